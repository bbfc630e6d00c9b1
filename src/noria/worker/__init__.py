"""One rank: it owns a device, the weights, the cache and the state of every slot, and carries out plans."""
