"""Model files: readers of GGUF and safetensors, block formats, finding and fetching of models.

Owns bytes on disk and nothing above them: it does not know architectures, tokenisers or devices.
"""
