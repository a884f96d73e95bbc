"""The volumes of a data set: layouts, splits, what a survey of them finds."""
