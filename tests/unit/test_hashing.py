"""Block hashes: equal for equal prefixes only, and never believed without the tokens."""

from __future__ import annotations

from array import array

from noria.cache.hashing import HashChain, PrefixIndex


def chain(tokens, salt="", size=4, **more):
    made = HashChain(size, salt, **more)
    made.extend(array("i", tokens))
    return made.digests


def test_only_full_blocks_are_hashed():
    assert len(chain(range(3))) == 0
    assert len(chain(range(8))) == 2
    assert len(chain(range(11))) == 2


def test_a_digest_covers_all_tokens_before_it():
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert chain([1, 2, 3, 4, 0, 0, 0, 0])[0] == one[0]


def test_salts_keep_prefixes_apart():
    assert chain(range(8), "key a") != chain(range(8), "key b")
    assert chain(range(8), "key a") == chain(range(8), "key a")


def test_growing_gives_the_same_digests_as_hashing_at_once():
    growing, tokens = HashChain(4, "salt"), array("i")
    for token in range(23):
        tokens.append(token)
        growing.extend(tokens)
    assert growing.digests == chain(range(23), "salt")


def test_a_collision_is_never_served():
    index = PrefixIndex()
    index.add(3, b"same", b"tokens a", "")
    assert index.find(b"same", b"tokens a", "").block == 3
    assert index.find(b"same", b"tokens b", "") is None


def test_equal_tokens_after_another_prefix_are_never_served():
    index = PrefixIndex()
    first, _ = index.add(0, b"first", b"a", "")
    index.add(1, b"second", b"b", first.serial)
    index.remove(0)
    again, _ = index.add(5, b"first", b"other tokens, same digest", "")
    assert index.find(b"second", b"b", again.serial) is None


def test_a_digest_that_leads_nowhere_is_taken_over():
    index = PrefixIndex()
    index.add(1, b"digest", b"b", 17)
    entry, loser = index.add(2, b"digest", b"b", 18)
    assert loser == 1
    assert index.find(b"digest", b"b", 18) is entry
    assert index.blocks() == {2}
    index.remove(2)
    assert len(index) == 0
