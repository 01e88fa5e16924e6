"""What a client's samples are for. The numbers are those of the results format and of the data sets' split columns."""

TRAIN, VALIDATION, TEST = 0, 1, 2
SPLITS = ("train", "validation", "test")
