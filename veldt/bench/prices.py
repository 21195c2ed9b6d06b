"""What env steps cost, from a file with the prices of cores and GPUs."""

import dataclasses
import math
from pathlib import Path

import yaml

from veldt.errors import UserError


@dataclasses.dataclass(frozen=True)
class Prices:
    currency: str
    core_hour: float
    gpu_hour: dict[str, float]  # by a substring of the GPU's name

    def hourly(self, cores: int, gpu: str = "") -> float:
        """Price per hour of a machine, with this GPU if one is named."""
        if not gpu:
            return cores * self.core_hour
        known = [price for kind, price in self.gpu_hour.items() if kind.lower() in gpu.lower()]
        if not known:
            raise UserError(f"The price file has no GPU whose name is in {gpu!r}; it has {', '.join(self.gpu_hour)}.")
        return cores * self.core_hour + known[0]


def read_prices(path: Path) -> Prices:
    try:
        found = yaml.safe_load(path.read_text())
        gpus = {str(kind): float(price) for kind, price in (found.get("gpu_hour") or {}).items()}
        prices = Prices(str(found["currency"]), float(found["core_hour"]), gpus)
    except OSError as error:
        raise UserError(f"The prices in {path} cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} is not a price file: it needs currency, core_hour and gpu_hour with a price by kind."
        ) from None
    if not all(0 <= price < math.inf for price in (prices.core_hour, *gpus.values())):
        raise UserError(f"{path} has prices that are negative or not finite.")
    return prices


def cost(rate: float, hourly: float) -> float:
    """Price of 1e9 env steps at this rate per second, on a machine with this price per hour."""
    return 1e9 / rate / 3600 * hourly
