"""Studies of live ranks: splits, carriers, shares and decoding, measured on two of them."""
