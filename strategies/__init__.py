"""The strategies by name; a new one is a file here and a line in `STRATEGIES`."""

from strategies.manual import ManualStrategy
from strategies.mirrored import MirroredStrategy
from strategies.multi_worker import MultiWorkerStrategy
from strategies.single import SingleStrategy

STRATEGIES = {
    strategy.name: strategy
    for strategy in (SingleStrategy, ManualStrategy, MirroredStrategy, MultiWorkerStrategy)
}
