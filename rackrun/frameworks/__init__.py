"""Adapters of training frameworks: their own loop, with rackrun's steps in it."""
