"""Noria beside other inference engines: same model, same prompts, same machine, in pairs, in one run.

`python -m peers --help` (with this folder's parent on PYTHONPATH), or `make bench-peers`. One module per engine, all
behind `base.Peer`; `runner` decides the order, `sessions` puts on the load, `table` writes what came out. In-process
engines are driven by scripts of `drivers/` that run in the engine's own environment.
"""
