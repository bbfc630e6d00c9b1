"""Starts workers and carries plans to them: `base` is the protocol, `local` one worker in this process."""
