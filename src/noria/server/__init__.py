"""The HTTP side: OpenAI's protocol over a client of an engine. Knows nothing of models, kernels or schedulers."""
