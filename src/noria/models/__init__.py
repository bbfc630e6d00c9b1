"""Architectures: what a checkpoint says of itself (`config`), how it is read (`loaders`), one file per family."""
