"""Pieces that several architectures share, each a few graph ops: embedding and head, norm, attention, MLP, rope."""
