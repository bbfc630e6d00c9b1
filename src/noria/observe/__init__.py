"""What an operator sees: metrics and logs. Knows messages, nothing of who sends them."""
