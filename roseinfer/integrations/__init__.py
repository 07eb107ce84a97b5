"""Interfaces to other systems: load reports for gateways, notifications for systemd."""
