"""fedquilt trains one model together on devices that cannot all hold it."""

from fedquilt import data, errors, methods, models
from fedquilt.data import FederatedData
from fedquilt.errors import FedquiltError
from fedquilt.experiment import Run, prepare, run
from fedquilt.family import Family, trace
from fedquilt.round import Evaluation, Fleet
from fedquilt.round.local import SGD, Adam, Constant, Cosine, Local, Steps
from fedquilt.terms import Arch, Budget, Client, Job, Payload, Server, Submodel, Update, World
from fedquilt.version import __version__

__all__ = [
    "SGD",
    "Adam",
    "Arch",
    "Budget",
    "Client",
    "Constant",
    "Cosine",
    "Evaluation",
    "Family",
    "FederatedData",
    "FedquiltError",
    "Fleet",
    "Job",
    "Local",
    "Payload",
    "Run",
    "Server",
    "Steps",
    "Submodel",
    "Update",
    "World",
    "__version__",
    "data",
    "errors",
    "methods",
    "models",
    "prepare",
    "run",
    "trace",
]
