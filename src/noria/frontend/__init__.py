"""Between the API and the engine: prompts to tokens, requests to an engine and back, tokens to text.

Knows nothing of HTTP above it, or of models and kernels below it.
"""
