"""Precision that changes while a model trains: phases, when they begin, what they take, and recovery from faults."""

from octavo.schedule.phase import Phase
from octavo.schedule.plan import BudgetError, PhasePlan, Plan
from octavo.schedule.schedule import PrecisionSchedule, Recovery, Switch

__all__ = ["BudgetError", "Phase", "PhasePlan", "Plan", "PrecisionSchedule", "Recovery", "Switch"]
