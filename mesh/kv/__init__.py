"""Canonical KV state: geometry, manifest, codecs, hashing and transfer. Knows no engine and no network."""
