"""The Resource-Aware Dispatcher: each tick, which pending request runs where, at which degree of sequence parallelism.

Pure: no I/O, no clock, no randomness. `IlpDispatcher` satisfies `tridentserve.protocols.Dispatcher`.
"""

from dispatch.dispatcher import IlpDispatcher
from dispatch.options import DispatchOptions, ValueOptions

__all__ = ["DispatchOptions", "IlpDispatcher", "ValueOptions"]
