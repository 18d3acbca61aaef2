"""Train on one rank: the loop and the parts it is assembled from."""
