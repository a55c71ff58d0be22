"""Measurements that a reader can repeat: `kvcache bench NAME`, one module each, with a `measure()` that returns rows.

Timings are medians over many rounds, contenders alternate inside one run, and ratios are what travels between machines.
"""
