"""Evaluation of models: attempts at benchmarks and files of rows, their scores, and reports."""
