"""Defines the options, each once, and a config class per command.

The order of the imports is the order of the commands in `--help`.
"""

# isort: skip_file
from app.config.base_config import Config
from app.config.training_configs import TrainConfig
from app.config.comparison_configs import CompareConfig, VerifyConfig
from app.config.finished_run_configs import EvaluateConfig, ReportConfig
from app.config.measurement_configs import BenchmarkConfig
from app.config.examination_configs import DemoConfig, DoctorConfig

__all__ = [
    "BenchmarkConfig",
    "CompareConfig",
    "Config",
    "DemoConfig",
    "DoctorConfig",
    "EvaluateConfig",
    "ReportConfig",
    "TrainConfig",
    "VerifyConfig",
]
