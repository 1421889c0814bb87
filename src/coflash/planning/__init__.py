"""Problem + device -> Plan: which path, which kernel, with which tiles, and what it should cost."""

from coflash.planning.cost import Cost, estimate
from coflash.planning.device import CHIPS, DeviceInfo, device_info, typical
from coflash.planning.plan import Plan, plan

__all__ = ["CHIPS", "Cost", "DeviceInfo", "Plan", "device_info", "estimate", "plan", "typical"]
