"""What the compared posteriors are called in tables and pictures."""

MAP, MINI, DEBIASED, CROSSFIT, FULL = METHODS = (
    "MAP",
    "mini-batch",
    "debiased",
    "cross-fitted",
    "full-batch",
)
