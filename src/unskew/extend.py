"""For authors of methods, calibrations, measures, networks, data sets, partitions, engines and loggers.

docs/how-to/extending.md has a complete example of each. These names are stable; the rest of the package may change.
They are imported on first use, like those of ``unskew``.

A method
    Algorithm               a federated algorithm, slot by slot; a method returns it with some slots replaced
    Method                  a function from Algorithm to Algorithm
    Step, Loss              a training step, the input of margins, blends and terms; the loss and its parts
    Margin, Blend, Term     added to the logits; replaces each example's loss; weights examples and adds penalties
    Head, Correction        transforms the classifier's weights; added to every gradient
    Perturbation            where each gradient is computed, as a Displacement of the model
    Local, Scale            the clients' training settings; the factor on a client's update
    require_sgd             refuses Adam for methods whose formula assumes SGD
    Available, Arrive       which clients can be drawn in a round; which of those drawn participate
    Sampler, Aggregate      draws clients; combines their updates
    ServerOptimizer         updates the server's parameters; RoundInfo is the state of the run
    Statistic, Memory       sent along with the model; kept by a client between visits. Both are computed from a Visited
    whole_model             the Memory of a client's entire model
    check_method            tests a method against every law; LawBroken reports the law that it breaks
A calibration
    Finisher, finisher      a calibration; the decorator that names it
    StatisticsRequest       the statistics that clients measure, with covariances Full, Diagonal, Shared or LowRank
    ClassStatistics         the statistics, summed over all clients
    Made                    a new classifier with notes; RealFeatures requests pooled features, as an upper bound
A measure
    Measure, Comparison     values, charts and sentences of a run; the section that compares runs
    FinishedRun             the run to measure; Missing reports that it lacks something
    Chart, Axis             a picture and its axes
    Line, Band, Bars, Dots, Cells, Rule, Picture, Words    the marks of a chart
    Choice, Table, Column   other elements of a page
A network, a data set, a partition
    Shape                   (channels, height, width) of a network's input
    Network                 a module with encoder and classifier; any other nn.Module works too
    ImageSet, Split         a data set; its train and test part
    Partition               which client has which example; an array of client numbers works too
An engine
    Engine                  the protocol of engines; EngineSetup is what an engine is opened with
    open_loop               the simplest engine, to build others on
    Roster, Visit, TestPart the clients and their sizes; a client's turn in a round; a part of the test images
    Reply, Failure, Note    what an engine yields for a visit: a result, a failure, or a note
    Outcome, add            the sum of the replies; adds replies in visit order
    Progress                called after each visit with the visits done and the total
    ClientSide              the client's data and network; Job: the work to do; PluginJob: a job of your own
    answer                  does a job for one visit, as every engine's worker does
    Blueprint               the simulation as text, from which another process builds its ClientSide
    encode_job, decode_job  a job as JSON, for another process
A logger
    Backend                 writes figures: start, write, close; its inputs are Facts, Figures and an Overview
Everywhere
    Key                     the only source of randomness
    Tensors, Sums           tensors by name; float64 tensors that may be added
    UserError               a user's mistake, in one message: what was given, what is expected, what to do
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # isort would put every name on its own line
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
    from unskew.engines.blueprint import Blueprint
    from unskew.loggers import Backend, Facts, Figures
    from unskew.models.networks import Network, Shape
    from unskew.round.algorithm import Algorithm, Method
    from unskew.round.client import ClientSide
    from unskew.round.client_memory import whole_model
    from unskew.round.jobs import PluginJob, add, answer, decode_job, encode_job
    from unskew.round.local_optimizers import require_sgd
    from unskew.runs.finished import FinishedRun
    from unskew.runs.prepare import Overview
    # isort: on

__all__ = [
    "Aggregate", "Algorithm", "Arrive", "Available", "Axis", "Backend", "Band", "Bars", "Blend", "Blueprint", "Cells",
    "Chart", "Choice", "ClassStatistics", "ClientSide", "Column", "Comparison", "Correction", "Diagonal",
    "Displacement", "Dots", "Engine", "EngineSetup", "Facts", "Failure", "Figures", "FinishedRun", "Finisher", "Full",
    "Head", "ImageSet", "Job", "Key", "LawBroken", "Line", "Local", "Loss", "LowRank", "Made", "Margin", "Measure",
    "Memory", "Method", "Missing", "Network", "Note", "Outcome", "Overview", "Partition", "Perturbation", "Picture",
    "PluginJob", "Progress", "RealFeatures", "Reply", "Roster", "RoundInfo", "Rule", "Sampler", "Scale",
    "ServerOptimizer", "Shape", "Shared", "Split", "Statistic", "StatisticsRequest", "Step", "Sums", "Table", "Tensors",
    "Term", "TestPart", "UserError", "Visit", "Visited", "Words", "add", "answer", "check_method", "decode_job",
    "encode_job", "finisher", "open_loop", "require_sgd", "whole_model",
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
    "engines.blueprint": "Blueprint",
    "loggers": "Backend Facts Figures",
    "models.networks": "Network Shape",
    "round.algorithm": "Algorithm Method",
    "round.client": "ClientSide",
    "round.client_memory": "whole_model",
    "round.jobs": "PluginJob add answer decode_job encode_job",
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
