"""Plain data in and out: JSON from untrusted files, converted into typed records and back (msgspec)."""
