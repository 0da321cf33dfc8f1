"""Networks next to the model: which ones a recipe has, what they are like, and stages that lack one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ups.config.description import TaskDescription
from ups.config.identity import recipe_identity
from ups.config.schema import Recipe
from ups.config.stage import CorrectorStageConfig

OPERATOR = {"type": "operator", "steps": 1}
FLOW = {"type": "corrector", "kind": "flow", "steps": 1}
DISTILL = {"type": "distill", "steps": 1}


def recipe(*stages: dict[str, Any], **sections: Any) -> Recipe:
    data = {"tasks": [{"name": "line", "path": "line.zarr"}]}
    document = {"run": {"name": "r"}, "data": data, "model": {"type": "multiscale"}, "stages": list(stages)}
    return Recipe.model_validate(document | sections)


def test_a_network_is_there_if_a_stage_needs_it_and_is_like_the_model_unless_it_is_said() -> None:
    assert list(recipe(OPERATOR).network_configs) == ["operator"]
    chain = recipe(OPERATOR, FLOW, DISTILL)
    assert chain.network_configs == dict.fromkeys(("operator", "flow", "student"), chain.model)
    small = {"type": "multiscale", "widths": [8, 16, 32]}
    said = recipe(OPERATOR, FLOW, DISTILL, networks={"flow": small})
    assert said.network_configs["student"] == said.network_configs["flow"] != said.model
    assert recipe(OPERATOR, networks={"steady": small}).network_configs["steady"].type == "multiscale"


def test_a_recipe_without_networks_has_the_identity_that_it_always_had() -> None:
    assert recipe_identity(recipe(OPERATOR)) == recipe_identity(recipe(OPERATOR, networks={}))
    other = recipe(OPERATOR, networks={"steady": {"type": "multiscale"}})
    assert recipe_identity(other) != recipe_identity(recipe(OPERATOR))


def test_a_student_without_a_teacher_and_a_corrector_without_an_operator_are_refused() -> None:
    with pytest.raises(ValidationError, match="learns from the network 'flow'"):
        recipe(OPERATOR, DISTILL)
    assert recipe(DISTILL | {"start_from": "runs/teacher"})
    with pytest.raises(ValidationError, match="continues from learned weights"):
        recipe(FLOW)
    with pytest.raises(ValidationError, match=r"networks\.critic"):
        recipe(OPERATOR, networks={"critic": {"type": "multiscale"}})


def test_what_a_corrector_has_learned_to_correct_is_not_trained_on_after_it() -> None:
    tasks = {"tasks": [{"name": name, "path": f"{name}.zarr"} for name in ("line", "map")]}
    steady, on_map, on_line = {"type": "steady", "steps": 1}, {"tasks": ["map"]}, {"tasks": ["line"]}
    for stages in ([OPERATOR, FLOW, OPERATOR], [OPERATOR, FLOW, steady], [OPERATOR, FLOW | on_map, steady | on_map]):
        with pytest.raises(ValidationError, match=r"stages\.2: '\w+' retrains the network .* \(task '(line|map)'\)"):
            recipe(*stages, data=tasks)
    for stage in (steady | on_map, OPERATOR | on_map):  # one network predicts both
        with pytest.raises(ValidationError, match=r"stages\.2: '\w+' retrains the network .* \(task 'line'\)"):
            recipe(OPERATOR, FLOW | on_line, stage, data=tasks)
    own = {"steady": {"type": "multiscale"}}
    assert recipe(OPERATOR, FLOW | on_line, DISTILL | on_line, steady | on_map, data=tasks, networks=own)
    assert recipe(OPERATOR, FLOW | on_line, steady, data=tasks, networks=own)  # of all steady tasks
    assert recipe(OPERATOR, FLOW, OPERATOR, FLOW, data=tasks)  # which is learned again


def test_a_flow_starts_from_nothing_and_has_the_rates_of_that_unless_they_are_said() -> None:
    rates = [
        recipe(OPERATOR, stage).stages[1].optim.learning_rate for stage in (FLOW, FLOW | {"optim": {"beta1": 0.8}})
    ]
    assert rates == [2e-3, 2e-3]
    said = FLOW | {"optim": {"learning_rate": 1e-4}}
    assert recipe(OPERATOR, said).stages[1].optim.learning_rate == 1e-4
    assert recipe(OPERATOR, FLOW).stages[1].optim.matrix_learning_rate == 5e-3


def test_a_description_takes_boundary_values() -> None:
    said = TaskDescription.model_validate(
        {
            "fields": [{"name": "u"}],
            "axes": [{"name": "x", "boundary": "dirichlet"}],
            "boundary_values": [{"channel": "u", "axis": "x", "end": "last", "value": 1.5}],
        }
    )
    assert said.boundary_values[0].value == 1.5
    with pytest.raises(ValidationError, match="first"):
        TaskDescription.model_validate(
            {"fields": [{"name": "u"}], "axes": [{"name": "x"}], "boundary_values": [{"end": "left"}]}
        )  # fmt: skip


def test_an_ensemble_learns_more_slowly_than_a_flow_unless_told() -> None:
    def rates(**settings: object) -> tuple[float, float]:
        optim = CorrectorStageConfig.model_validate({"steps": 1, **settings}).optim
        return optim.learning_rate, optim.matrix_learning_rate

    assert rates() == rates(kind="flow") == (2e-3, 5e-3)
    assert rates(kind="ensemble") == (1.5e-4, 3.75e-4)
    assert rates(kind="ensemble", optim={"learning_rate": 1e-3}) == (1e-3, 3.75e-4)
