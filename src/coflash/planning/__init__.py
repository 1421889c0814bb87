"""Problem + device -> Plan: which path, which kernel, with which tiles, and what it should cost."""

from coflash.planning.cost import Cost, estimate
from coflash.planning.device import DeviceInfo, device_info, typical
from coflash.planning.plan import Plan, plan

__all__ = ["Cost", "DeviceInfo", "Plan", "device_info", "estimate", "plan", "typical"]
