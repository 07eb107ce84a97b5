"""Number and devices of engines: which options can be combined."""

import pytest

from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import ConfigError


def test_one_engine_unless_asked():
    config = ReplicasConfig()
    assert (config.count, config.device_list) == (1, ())


def test_devices_say_how_many():
    config = ReplicasConfig(devices="0, 3")
    assert (config.count, config.device_list) == (2, ("0", "3"))
    assert ReplicasConfig(devices="0+1,2+3").device_list == ("0+1", "2+3")
    assert ReplicasConfig(devices="0+0+0,2+2+2").gpu_lists == [[0, 0, 0], [2, 2, 2]]
    assert ReplicasConfig(devices="1,0", replicas=2, router="least").device_list == ("1", "0")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"replicas": 0}, "replicas must be positive"),
        ({"devices": ""}, "devices must be GPU numbers"),
        ({"devices": "0,,1"}, "devices must be GPU numbers"),
        ({"devices": "cuda:0"}, "devices must be GPU numbers"),
        ({"devices": "0+"}, "devices must be GPU numbers"),
        ({"devices": "0+1,1+2"}, "devices must name each GPU once"),
        ({"devices": "0+0+1"}, "devices must name each GPU once, or one GPU for all processes of an engine"),
        ({"devices": "0+0,0+0"}, "devices must name each GPU once"),
        ({"devices": "0+0,0"}, "devices must name each GPU once"),
        ({"devices": "-1"}, "devices must be GPU numbers"),
        ({"devices": "0,1,0"}, "devices must name each GPU once"),
        ({"devices": "0,00"}, "devices must name each GPU once"),
        ({"devices": "0,1", "replicas": 3}, "replicas is 3, but --devices names 2"),
        ({"router": "least"}, "router needs several engines"),
        ({"router": "least", "devices": "1"}, "router needs several engines"),
        ({"engine_timeout": 0.0}, "engine_timeout must be positive"),
        ({"engine_timeout": float("nan")}, "engine_timeout must be positive"),
        ({"drain_timeout": -1.0}, "drain_timeout must not be negative"),
    ],
)
def test_what_does_not_go_together_is_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ReplicasConfig(**options)
