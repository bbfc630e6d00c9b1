"""Where keys and values lie: block pool, prefix hashes, managers. Knows block ids only, never their contents."""
