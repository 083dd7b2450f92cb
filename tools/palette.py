"""The colours of the plots: Paul Tol's, which the colour-blind can tell apart."""

INDIGO = "#332288"  # the first series
ROSE = "#cc6677"  # the second series
GREY = "#aaaaaa"  # the ideal
