"""Rewards that read answers: numbers, expressions, boxes."""
