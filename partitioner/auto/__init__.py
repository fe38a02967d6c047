"""partition=auto: the split that balances a cost of few constants, corrected by every prompt.

The cost of a chunk is the rank's slowness times what the work should take: tokens * a + attended pairs * b + c.
A few timed layers give a, b and c; what each rank then computes for every prompt gives its slowness.
"""
