"""How weights are stored: the choice of a scheme per tensor, and round-to-nearest quantisation."""
