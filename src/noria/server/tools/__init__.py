"""Calls of functions and reasoning in an answer: how models of each family write them, and how they are made to."""
