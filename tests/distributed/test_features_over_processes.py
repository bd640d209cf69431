"""Each feature has the numbers of one process on data that several processes share."""

import feature_tasks as tasks
import numpy as np
import pandas
import pytest
import torch

FEATURES = [
    tasks.ordinal,
    tasks.poisson,
    tasks.bradley_terry,
    tasks.subnetwork,
    tasks.function_of_parameters,
    tasks.precision_per_parameter,
    tasks.bridge,
    tasks.weighted_evaluation,
    tasks.gradients_in_inputs,
    tasks.compat,
    tasks.conformal_by_group,
    tasks.estimates,
]


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_two_processes_have_the_numbers_of_one(processes, feature):
    expected = feature(0)
    for numbers in processes.run(2, feature):
        assert isinstance(numbers, dict), numbers
        assert numbers.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                numbers[name], value, rtol=1e-9, atol=1e-11, equal_nan=True, msg=name
            )


@pytest.mark.slow
@pytest.mark.parametrize("task", tasks.RECALIBRATED)
def test_two_processes_recalibrate_as_one(processes, task, tmp_path):
    tasks.recalibrated(0, task, tmp_path / "one")
    folders = processes.run(2, tasks.recalibrated, task, str(tmp_path / "two"))
    assert folders == [str(tmp_path / "two")] * 2
    for method in tasks.RECALIBRATED[task]:
        table = f"predictions/{method.key}/test.parquet"
        expected = pandas.read_parquet(tmp_path / "one" / table)
        actual = pandas.read_parquet(tmp_path / "two" / table)
        assert list(actual["label"]) == list(expected["label"])
        np.testing.assert_allclose(
            np.stack(actual["probs"]), np.stack(expected["probs"]), rtol=1e-6, atol=1e-7
        )
