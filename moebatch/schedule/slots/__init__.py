"""Slots for experts, and who gets one."""
