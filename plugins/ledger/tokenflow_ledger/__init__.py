"""The ledger plugin."""
