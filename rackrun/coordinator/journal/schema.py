"""The tables of a journal; `rackrun.coordinator.journal.journal_writer` describes their contents."""

from __future__ import annotations

__all__ = ["FORMAT", "READABLE", "SCHEMA"]

FORMAT = 4
READABLE = (3, FORMAT)

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, cause INTEGER, kind TEXT, name TEXT, at_ms INTEGER, wall REAL, body TEXT,
    rule TEXT);
CREATE TABLE IF NOT EXISTS generations (
    id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, stage TEXT NOT NULL, at_ms INTEGER, wall REAL, body TEXT);
CREATE TABLE IF NOT EXISTS recoveries (generation INTEGER PRIMARY KEY, fault_ms REAL, body TEXT);
CREATE TABLE IF NOT EXISTS units (
    step INTEGER, phase INTEGER, rank INTEGER, generation INTEGER, attempt INTEGER, committed_at_ms REAL, seconds REAL,
    gate BLOB, own_s REAL, PRIMARY KEY (step, phase, rank, generation)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger (
    step INTEGER, phase INTEGER, rank INTEGER, generation INTEGER, count INTEGER, digest BLOB, ids BLOB,
    PRIMARY KEY (step, phase, rank, generation));
CREATE TABLE IF NOT EXISTS folded (
    step INTEGER, phase INTEGER, generation INTEGER, samples INTEGER, untold INTEGER, ids BLOB, seconds REAL, vain INTEGER,
    PRIMARY KEY (step, phase)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS findings (kind TEXT, what TEXT);
CREATE TABLE IF NOT EXISTS fillers (
    slot TEXT, incarnation INTEGER, start INTEGER, at_ms REAL, body TEXT, PRIMARY KEY (slot, incarnation, start));
"""
