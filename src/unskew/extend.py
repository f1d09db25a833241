"""What authors import: a method, calibration, measure, network, data set, partition, engine or logger of your own.

docs/how-to/extending.md has a complete example of each. These names are promises; the rest of the package may move.
They are imported when first used, like those of ``unskew``.

A method
    Algorithm               what a federation does in a round, slot by slot; a method gives one with slots changed
    Method                  a function from Algorithm to Algorithm
    Step, Loss              what a margin, a blend and a term see of a training step; the loss in its parts
    Margin, Blend, Term     what is added to the logits; replaces each example's loss; weighs examples, adds penalties
    Head, Correction        how the classifier's weights are used; what is added to every gradient
    Perturbation            where each gradient is taken; it returns a Displacement of the model
    Local, Scale            the clients' training settings; the factor on a client's update
    require_sgd             refuses Adam by the method's name, where its formula counts SGD's steps
    Available, Arrive       who can be drawn in a round; who of those drawn comes
    Sampler, Aggregate      who is drawn; how updates become one
    ServerOptimizer         how the server moves; RoundInfo is the state of the run
    Statistic, Memory       what travels with the model; what a client keeps. Both see a Visited
    whole_model             the Memory that keeps a client's whole model
    check_method            tries every law on a method; LawBroken says which one it breaks
A calibration
    Finisher, finisher      the calibration as a value; the decorator that names it
    StatisticsRequest       what clients measure, with covariances Full, Diagonal, Shared or LowRank
    ClassStatistics         what they measured, summed over all clients
    Made                    a new classifier with more to report; RealFeatures asks for a bound for study
A measure
    Measure, Comparison     the record: values, charts, sentences; its section where runs are compared
    FinishedRun             what a measure is taken of; Missing says that the run lacks something
    Chart, Axis             a picture and its axes
    Line, Band, Bars, Dots, Cells, Rule, Picture, Words    the marks in it
    Choice, Table, Column   what else a page can show
A network, a data set, a partition
    Shape                   (channels, height, width) of the images that a network takes
    Network                 a module with encoder and classifier; any other nn.Module works too
    ImageSet, Split         a data set; its train and test part
    Partition               who holds which example; an array of client numbers works too
An engine
    Engine                  what every engine can do; EngineSetup is what it is opened with
    open_loop               the plain engine, to build others from
    Roster, Visit, TestPart the clients and their sizes; one client's turn; a part of the test images
    Reply, Failure, Note    what an engine yields for a visit; one that failed; something else to report
    Outcome, add            the outcome of an exchange; adds replies in visit order
    Progress                called after each visit: how much is done, of how much
    ClientSide              what a client's work is done with; Job: the work itself; PluginJob: one of your own
    answer                  does a job for one visit, as every engine's worker does
A logger
    Backend                 where figures go: start, write, close; Facts, Figures and Overview are what it is given
Everywhere
    Key                     the only source of randomness
    Tensors, Sums           tensors by name; float64 tensors that may be added
    UserError               a mistake of the user, in one message: what was given, what is wanted, what to do
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # isort would give every type a line of its own
    # isort: off
    from unskew.analysis.measure import Choice, Column, Comparison, Measure, Table
    from unskew.calibration.covariances import Diagonal, Full, LowRank, Shared
    from unskew.calibration.finisher import Finisher, Made, RealFeatures, StatisticsRequest, finisher
    from unskew.calibration.statistics import ClassStatistics
    from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Line, Picture, Rule, Words
    from unskew.checks import LawBroken, check_method
    from unskew.core.errors import Missing, UserError
    from unskew.core.key import Key
    from unskew.core.types import Aggregate, Arrive, Available, Blend, Correction, Displacement, Engine, Failure, Head
    from unskew.core.types import ImageSet, Job, Local, Loss, Margin, Memory, Note, Outcome, Perturbation, Progress
    from unskew.core.types import Reply, Roster, RoundInfo
    from unskew.core.types import Sampler, Scale, ServerOptimizer, Split, Statistic, Step, Sums, Tensors, Term
    from unskew.core.types import TestPart, Visit, Visited
    from unskew.data.population import Partition
    from unskew.engines import EngineSetup, open_loop
    from unskew.loggers.backends import Backend, Facts, Figures
    from unskew.models.networks import Network, Shape
    from unskew.round.algorithm import Algorithm, Method
    from unskew.round.client import ClientSide
    from unskew.round.client_memory import whole_model
    from unskew.round.jobs import PluginJob, add, answer
    from unskew.round.local_optimizers import require_sgd
    from unskew.runs.finished import FinishedRun
    from unskew.runs.prepare import Overview
    # isort: on

__all__ = [
    "Aggregate", "Algorithm", "Arrive", "Available", "Axis", "Backend", "Band", "Bars", "Blend", "Cells", "Chart",
    "Choice", "ClassStatistics", "ClientSide", "Column", "Comparison", "Correction", "Diagonal", "Displacement", "Dots",
    "Engine", "EngineSetup", "Facts", "Failure", "Figures", "FinishedRun", "Finisher", "Full", "Head", "ImageSet",
    "Job", "Key", "LawBroken", "Line", "Local", "Loss", "LowRank", "Made", "Margin", "Measure", "Memory", "Method",
    "Missing", "Network", "Note", "Outcome", "Overview", "Partition", "Perturbation", "Picture", "PluginJob",
    "Progress", "RealFeatures", "Reply", "Roster", "RoundInfo", "Rule", "Sampler", "Scale", "ServerOptimizer", "Shape",
    "Shared", "Split", "Statistic", "StatisticsRequest", "Step", "Sums", "Table", "Tensors", "Term", "TestPart",
    "UserError", "Visit", "Visited", "Words", "add", "answer", "check_method", "finisher", "open_loop", "require_sgd",
    "whole_model",
]  # fmt: skip

_NAMES = {
    "analysis.measure": "Choice Column Comparison Measure Table",
    "calibration.covariances": "Diagonal Full LowRank Shared",
    "calibration.finisher": "Finisher Made RealFeatures StatisticsRequest finisher",
    "calibration.statistics": "ClassStatistics",
    "charts": "Axis Band Bars Cells Chart Dots Line Picture Rule Words",
    "checks": "LawBroken check_method",
    "core.errors": "Missing UserError",
    "core.key": "Key",
    "core.types": "Aggregate Arrive Available Blend Correction Displacement Engine Failure Head ImageSet Job Local "
    "Loss Margin Memory Note Outcome Perturbation Progress Reply Roster RoundInfo Sampler Scale ServerOptimizer "
    "Split Statistic Step Sums Tensors Term TestPart Visit Visited",
    "data.population": "Partition",
    "engines": "EngineSetup open_loop",
    "loggers.backends": "Backend Facts Figures",
    "models.networks": "Network Shape",
    "round.algorithm": "Algorithm Method",
    "round.client": "ClientSide",
    "round.client_memory": "whole_model",
    "round.jobs": "PluginJob add answer",
    "round.local_optimizers": "require_sgd",
    "runs.prepare": "Overview",
    "runs.finished": "FinishedRun",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unskew.extend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unskew.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
