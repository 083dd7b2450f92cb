"""The colours of all pictures: Paul Tol's, which the colour-blind can tell apart."""

INDIGO = "#332288"  # computation, or the first series
GREEN = "#228833"  # communication, or the second series
SAND = "#ddcc77"  # a backward pass, or the third series
ROSE = "#cc6677"  # what waits or is wrong
CYAN = "#88ccee"  # data
GREY = "#aaaaaa"  # idle
SERIES = INDIGO, GREEN, SAND, ROSE, CYAN
