"""The relations of the PyramidInfer paper: the shape of the pyramid, and the recent ratio."""
