"""Configs of verl, translated into ours."""
