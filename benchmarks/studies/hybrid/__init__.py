"""TTFT of a chain with a hybrid model beside one of attention alone, of the same widths."""
