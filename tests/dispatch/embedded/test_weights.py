"""Information about the model, and changing it while the engine runs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.dispatch.embedded.conftest import StartEngine
from tests.dispatch.embedded.engine_under_test import EngineUnderTest, wait_until

BEES = "The bees were calm, and the bees were calm again.\n"


@pytest.fixture
def bees(tmp_path: Path) -> str:
    path = tmp_path / "bees.txt"
    path.write_text(BEES)
    return str(path)


def said(engine: EngineUnderTest, **sampling: Any) -> Any:
    return engine.generate("The", temperature=0, max_new_tokens=4, **sampling).json()


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_describes_itself(engine: EngineUnderTest, path: str) -> None:
    info = engine.get(path).json()
    assert info["model_path"].endswith("corpus.txt")
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    assert 500 < info["vocab_size"] < 5000
    assert info["max_input_tokens"] == 2048


def test_the_model_is_listed(engine: EngineUnderTest) -> None:
    models = engine.get("/v1/models").json()
    assert models["object"] == "list"
    assert models["data"][0]["id"].endswith("corpus.txt")


def test_both_load_endpoints_agree(engine: EngineUnderTest) -> None:
    assert engine.get("/get_load").json() == engine.loads()
    assert {"num_running", "num_waiting", "num_tokens_total"} <= set(engine.loads())


def test_an_update_changes_what_is_said_and_the_version_it_is_said_under(
    start_engine: StartEngine, bees: str
) -> None:
    engine = start_engine("--weight-version", "v1", "--token-rate", "2000")
    before = said(engine)
    size = engine.get("/model_info").json()["vocab_size"]
    update = {"model_path": bees, "weight_version": "v2"}
    assert engine.post("/update_weights_from_disk", update).json()["success"] is True
    after = said(engine)
    assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("v1", "v2")
    assert after["text"] == " bees were calm,"
    assert before["text"] != after["text"]
    info = engine.get("/model_info").json()
    assert (info["model_path"], info["weight_version"], info["vocab_size"]) == (bees, "v2", size)
    assert engine.post("/update_weights_from_disk", {"model_path": str(Path(bees).parent)}).status_code == 200
    assert engine.get("/model_info").json()["weight_version"] == "v2"


@pytest.mark.parametrize("body", [{"model_path": "/nowhere/model.txt"}, {"model_path": "/"}])
def test_a_bad_path_is_a_400_and_changes_nothing(engine: EngineUnderTest, body: dict[str, str]) -> None:
    response = engine.post("/update_weights_from_disk", {**body, "weight_version": "bad"})
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert body["model_path"] in response.json()["message"]
    assert engine.get("/model_info").json()["weight_version"] == "default"


@pytest.mark.parametrize("body", [{}, {"model_path": 4}])
def test_a_malformed_update_is_a_400(engine: EngineUnderTest, body: Any) -> None:
    assert engine.post("/update_weights_from_disk", body).status_code == 400


def test_an_update_in_the_middle_waits_for_the_work_in_flight(
    start_engine: StartEngine, pool: ThreadPoolExecutor, bees: str
) -> None:
    engine = start_engine("--weight-version", "v1", "--token-rate", "2000")
    old = pool.submit(engine.generate, "The", rid="old", max_new_tokens=1_000_000, ignore_eos=True)
    wait_until(lambda: engine.loads()["num_running"] == 1, "the old one runs")
    update = pool.submit(
        engine.post, "/update_weights_from_disk", {"model_path": bees, "weight_version": "v2"}
    )
    wait_until(lambda: engine.loads()["updating"], "the update waits")
    new = pool.submit(said, engine)
    wait_until(lambda: engine.loads()["num_waiting"] == 1, "the new one is held back")
    assert not update.done()
    engine.post("/abort_request", {"rid": "old"})
    assert old.result(10).json()["meta_info"]["weight_version"] == "v1"
    assert update.result(10).json()["success"] is True
    assert new.result(10)["meta_info"]["weight_version"] == "v2"


def test_an_engine_paused_in_place_updates_only_without_the_flush(
    start_engine: StartEngine, pool: ThreadPoolExecutor, bees: str
) -> None:
    engine = start_engine("--faults", "--weight-version", "v1", "--token-rate", "2000")
    engine.faults("freeze")  # until it is paused, which it may else end before
    asked = pool.submit(engine.generate, "The", max_new_tokens=1500, ignore_eos=True)
    wait_until(lambda: engine.loads()["num_running"] == 1, "it runs")
    engine.post("/pause_generation", {"mode": "in_place"})
    engine.clear_faults()
    update = {"model_path": bees, "weight_version": "v2"}
    refused = engine.post("/update_weights_from_disk", update)
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert "in flight" in refused.json()["message"]
    assert engine.get("/model_info").json()["weight_version"] == "v1"
    assert engine.post("/update_weights_from_disk", {**update, "flush_cache": False}).status_code == 200
    engine.post("/continue_generation")
    reply = asked.result(10).json()
    assert reply["meta_info"]["weight_version"] == "v2"
    assert "bees were calm" in reply["text"]


def test_a_model_path_at_the_start_is_trained_on(start_engine: StartEngine, bees: str) -> None:
    engine = start_engine("--model-path", bees)
    assert said(engine)["text"] == " bees were calm,"
