"""Accuracy of a served model on questions with known answers, with the uncertainty that belongs to it."""
