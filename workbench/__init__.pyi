"""The front door, name by name: read by type checkers and editors, and by `__init__.py`, which imports on first use."""

from workbench.advise.compare import compare as compare
from workbench.advise.doctor import diagnose as diagnose
from workbench.advise.fair import side_by_side as side_by_side
from workbench.advise.frame import records as records
from workbench.advise.leaks import holders as holders
from workbench.advise.leaks import release as release
from workbench.advise.plan import plan as plan
from workbench.base.categories import Category as Category
from workbench.base.categories import Phase as Phase
from workbench.base.categories import format_bytes as format_bytes
from workbench.base.device import Device as Device
from workbench.base.device import describe_device as describe_device
from workbench.base.device import pick_device as pick_device
from workbench.export.script import script as script
from workbench.export.settings import read_settings as read_settings
from workbench.fit.apply import apply as apply
from workbench.fit.will_it_fit import WillItFit as WillItFit
from workbench.journal.record import Record as Record
from workbench.lessons import plots as plots
from workbench.measure.meter import Meter as Meter
from workbench.prediction.predict import predict as predict
from workbench.prediction.prediction import Prediction as Prediction
from workbench.recipe import Recipe as Recipe
from workbench.recipe import read_recipe as read_recipe
from workbench.training.preview import show as show
from workbench.training.ranks.launch import run_on_ranks as run_on_ranks
from workbench.training.run import run as run
from workbench.widgets.playground import Playground as Playground

__version__: str
