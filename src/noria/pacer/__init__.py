"""The pacer: measures load, learns what steps cost, and sets batch size and token budget. Knows no scheduler."""
