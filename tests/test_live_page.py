"""Tests `report --watch`: the page of a training in progress, and the server's access checks."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

import report_samples
import test_report
from app.records.check_value import without_check
from app.records.event_file import EVENTS_FILE, EventFile
from app.records.event_reader import EventReader
from app.records.files import read_json
from app.records.history import load_history
from app.report.live_page import LivePage
from app.report.live_run import LiveRun, find_newest_run
from app.report.live_server import LiveServer, open_server
from app.runtime.errors import ConfigError
from conftest import ROOT, program_environment
from in_process import run_here
from test_report import CHROMIUM, HOSTILE, Page, in_a_browser


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "runs" / "first"
    log = report_samples.write_running(path)
    yield path
    log.close()


@contextlib.contextmanager
def serving(*directories, page=None):
    with LiveServer(0, page or LivePage(directories)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port, path="/", method="GET", host=None, **headers):
    """Sends a request; returns status, headers and text of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for each in [f"127.0.0.1:{port}"] if host is None else host:
        connection.putheader("Host", each)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return found


def shown(*directories):
    """Returns all that the page shows, as a `Page` of test_report."""
    return Page(LivePage(directories).page())


def text_of(*directories):
    return " ".join(" ".join(shown(*directories).text).split())


def tiles(*directories):
    """Returns name → (value, note) of the numbers on top of the page."""
    html = LivePage(directories).update()["parts"]["state"]
    found = re.findall(r'<dt>(.*?)</dt><dd class="\w*">(.*?)</dd><dd class="note">(.*?)</dd>', html)
    return {name: (value, note) for name, value, note in found}


class TestPage:
    def test_it_has_the_numbers_of_the_records(self, run_dir):
        page = shown(run_dir)
        assert "Training: epoch 2 of 4, step 15 of 40" in page.text
        assert (1, str(run_dir)) in page.headings
        found = tiles(run_dir)
        (record,) = load_history(run_dir)
        assert found["loss"][0] == f"{2 / 10:.4f}"  # The median of five.
        assert found["test accuracy"][0] == f"{record.test_accuracy:.4f}"
        assert found["images/s"][0] == "4,321"
        assert found["verified steps"] == ("3", "0 mismatches")
        rows = page.rows("Finished epochs, newest first")
        assert rows["1"]["train loss"] == f"{record.train_loss:.4f}" and len(rows) == 1
        (progress,) = page.named("progress")
        assert (progress["max"], progress["value"]) == ("40", "15")
        text = " ".join(page.text)
        assert "lenet on GENERATED garments, manual, 2 simulated CPUs, recipe d2l" in text
        assert "timing is not scaling" in text and "GENERATED images" in text
        assert "03:04:05 epoch 1/4" in text and "03:04:06 WARNING slow" in text

    def test_the_curves_are_those_of_the_steps_within_the_first_epoch(self, tmp_path):
        report_samples.write_running(tmp_path, num_epochs=0, steps=(1, 2, 3)).close()
        page = shown(tmp_path)
        charts = [attrs for name, attrs, _ in page.elements if name == "svg"]
        assert [c["class"] for c in charts if c["class"] == "chart"] == ["chart"] * 3
        assert "loss over steps, first to last. training: 2.0000 to 0.6667" in page.text
        assert not any("test:" in each for each in page.text)

    def test_the_end_of_the_training_is_estimated(self, tmp_path, monkeypatch):
        report_samples.write_running(tmp_path, steps=()).close()
        start = LiveRun.load(tmp_path, [], None).started
        events = EventFile(tmp_path)
        for step, passed_sec in ((5, 10), (15, 30)):
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda sec=passed_sec: start + sec)
                events.add(step, {"steps/loss": 1.0})
        reader = EventReader(tmp_path)
        reader.update()
        run = LiveRun.load(tmp_path, reader.points, reader.latest)
        assert run.remaining_sec == pytest.approx(2 * (40 - 15))
        assert tiles(tmp_path)["time left"][0] == "≈ 50 s"

    def test_a_directory_that_is_not_there_yet(self, tmp_path):
        page = LivePage([tmp_path / "later"])
        assert "No training here yet" in page.page()
        (tmp_path / "later").mkdir()
        (tmp_path / "later" / ".lock").touch()
        assert "Starting: the data are loaded" in page.page()
        log = report_samples.write_running(tmp_path / "later", num_epochs=0, steps=())
        assert "Compiling: the first step follows" in page.page()
        log.close()

    @pytest.mark.parametrize(
        ("exit_code", "error", "mark", "told"),
        [
            (0, None, "good", "Finished: 1 epoch, test accuracy 0.0000"),
            (130, None, "differs", "Interrupted at step 15 of 40"),
            (143, None, "differs", "Terminated at step 15 of 40"),
            (7, "the loss is nan", "bad", "Diverged: stopped at step 15 of 40 the loss is nan"),
            (9, "step 15 is wrong", "bad", "Mismatch: stopped at step 15 of 40 step 15 is wrong"),
            (8, "disk full", "bad", "Disk full: stopped at step 15 of 40"),
        ],
    )
    def test_a_training_that_has_ended(self, tmp_path, exit_code, error, mark, told):
        log = report_samples.write_running(tmp_path)
        log.stop(exit_code, **({"error": error} if error else {}))
        log.close()
        page = shown(tmp_path)
        assert told in " ".join(page.text)
        assert {"class": f"headline {mark}"} in page.named("p")
        assert "time left" not in page.text and "in the last attempt" in page.text
        if exit_code == 9:  # Not green beside it.
            assert tiles(tmp_path)["verified steps"] == ("3", "then the mismatch above")

    def test_the_page_follows_a_training_to_its_end_and_slows_down(self, run_dir):
        page = LivePage([run_dir])
        first = page.update()
        EventFile(run_dir).add(20, {"steps/loss": 0.1})  # A new file, as a resumed run writes it.
        second = page.update()
        assert "step 20 of 40" in second["parts"]["state"]
        assert first["title"].startswith("38% ") and second["title"].startswith("50% ")
        assert second["parts"]["epochs"] == first["parts"]["epochs"]
        with contextlib.closing(report_samples.RunLog(run_dir)) as log:
            log.start(versions={})
            log.stop(0)
        last = page.update()
        assert last["title"].startswith("Finished") and last["refresh_sec"] >= 10

    def test_a_process_that_is_no_more_is_told(self, run_dir):
        path = run_dir / "log.jsonl"
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        events = [without_check(json.loads(line)) for line in path.read_text().splitlines()]
        events[0]["pid"] = ended.pid
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        assert "Stopped without a last message, at step 15 of 40" in text_of(run_dir)

    def test_lines_that_are_not_complete_yet_are_left_out(self, run_dir):
        whole = (run_dir / "history.jsonl").read_text()
        (run_dir / "history.jsonl").write_text(whole + whole[: len(whole) // 2])
        log = (run_dir / "log.jsonl").read_text()
        (run_dir / "log.jsonl").write_text(log + '{"event": "epo')
        rows = shown(run_dir).rows("Finished epochs, newest first")
        assert list(rows) == ["1"]

    @pytest.mark.parametrize(
        "name", ["history.jsonl", "log.jsonl", "log.txt", "config.json", EVENTS_FILE]
    )
    @pytest.mark.parametrize("content", [b"", b"\xff\x00" * 99, b"[]\n", b'{"event": 1}\n', None])
    def test_a_damaged_or_missing_record_ends_nothing(self, run_dir, name, content):
        (run_dir / name).unlink()
        if content is not None:
            (run_dir / name).write_bytes(content)
        Page(LivePage([run_dir]).page())

    def test_hostile_names_and_texts_are_shown_as_they_are(self, tmp_path):
        path = tmp_path / "<img src=x onerror=alert(1)>"
        log = report_samples.write_running(path, model=HOSTILE, strategy=HOSTILE, inject=HOSTILE)
        log.stop(9, error=HOSTILE)
        log.close()
        (path / "log.txt").write_text(f"2026-01-02 03:04:05,678 INFO {HOSTILE}</pre>\x1b[2J\n")
        page = shown(path)
        assert len(page.named("script")) == 1 and not page.named("img") and not page.named("b")
        assert page.text.count(HOSTILE) == 1 and sum(HOSTILE in each for each in page.text) == 4
        assert "\x1b" not in "".join(page.text)

    def test_a_case_has_examples_and_no_accuracy(self, tmp_path):
        log = report_samples.write_running(tmp_path, steps=(), case="my_case.py")
        EventFile(tmp_path).add(3, {"steps/loss": 1.5, "steps/images_per_sec": 8.0})
        history = read_json(tmp_path / "history.jsonl")
        history |= {"train_accuracy": None, "test_accuracy": None}
        (tmp_path / "history.jsonl").write_text(json.dumps(history))
        page = shown(tmp_path)
        log.close()
        assert tiles(tmp_path)["examples/s"][0] == "8" and "accuracy" not in page.text
        assert "examples/s" in page.tables["Finished epochs, newest first"][0]

    def test_a_run_of_another_command(self, tmp_path):
        report_samples.write_verification(tmp_path)
        assert "No training: this is a run of verify" in text_of(tmp_path)


class TestNewestRun:
    def test_the_attempt_that_was_started_last_is_shown(self, tmp_path):
        names = ["first", "compared/single", "compared/manual"]
        for age, name in enumerate(names):
            report_samples.write_running(tmp_path / name).close()
            (tmp_path / name / ".lock").touch()
            os.utime(tmp_path / name / ".lock", (10 - age, 10 - age))
        assert find_newest_run([tmp_path]) == tmp_path / "first"
        assert find_newest_run([tmp_path / "compared"]) == tmp_path / "compared" / "single"
        os.utime(tmp_path / "compared" / "manual" / ".lock", (20, 20))
        assert find_newest_run([tmp_path]) == tmp_path / "compared" / "manual"
        assert find_newest_run([tmp_path / "first", tmp_path / "no"]) == tmp_path / "first"
        assert find_newest_run([tmp_path / "no"]) == tmp_path / "no"

    def test_the_page_goes_to_a_training_that_is_started_later(self, run_dir):
        page = LivePage([run_dir.parent])
        assert str(run_dir) in page.update()["title"]
        report_samples.write_running(run_dir.parent / "second", steps=(1,)).close()
        (run_dir.parent / "second" / ".lock").touch()
        (run_dir / ".lock").touch()
        os.utime(run_dir / ".lock", (1, 1))
        assert "step 10 of 40" in page.update()["parts"]["state"]


class TestEvents:
    def test_what_was_appended_is_read_further(self, tmp_path):
        reader, events = EventReader(tmp_path), EventFile(tmp_path)
        reader.update()
        assert reader.points == [] and reader.latest is None
        for step in (1, 2, 300):
            events.add(step, {"steps/loss": 1 / step, "epochs/test_loss": 7.0})
            reader.update()
        assert [p.step for p in reader.points] == [1, 2, 300]
        assert reader.latest.values == {"steps/loss": pytest.approx(1 / 300)}
        assert abs(reader.latest.time - time.time()) < 100

    def test_a_record_that_is_not_complete_is_waited_for(self, tmp_path):
        EventFile(tmp_path).add(7, {"steps/loss": 0.5})
        path = tmp_path / EVENTS_FILE
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            reader = EventReader(tmp_path)
            reader.update()
            assert reader.points == []
            path.write_bytes(whole)
            reader.update()
            assert [p.step for p in reader.points] == [7]

    def test_a_file_that_was_replaced_is_read_anew(self, tmp_path):
        events, reader = EventFile(tmp_path), EventReader(tmp_path)
        for step in (1, 2, 3):
            events.add(step, {"steps/loss": 1.0})
        reader.update()
        EventFile(tmp_path).add(1, {"steps/loss": 9.0})
        reader.update()
        assert [(p.step, p.values["steps/loss"]) for p in reader.points] == [(1, 9.0)]
        (tmp_path / EVENTS_FILE).unlink()
        reader.update()
        assert reader.points == [] and reader.latest is None

    def test_points_stay_few_and_are_means_over_equally_many_calls(self, tmp_path):
        events, reader = EventFile(tmp_path), EventReader(tmp_path)
        for step in range(1, 1501):
            events.add(step, {"steps/loss": float(step)})
            if step % 100 == 0:
                reader.update()
        assert reader.latest.step == 1500 and 300 <= len(reader.points) < 600
        assert {p.step - p.values["steps/loss"] for p in reader.points} == {1.5}

    @pytest.mark.parametrize(
        "record", [b"\xff" * 30, b"\x08", b"\x0b\x00", b"\x2a\x7f\x00", b"\x09\x00"]
    )
    def test_what_is_no_event_ends_the_reading(self, tmp_path, record):
        EventFile(tmp_path).add(1, {"steps/loss": 1.0})
        path = tmp_path / EVENTS_FILE
        framed = struct.pack("<QI", len(record), 0) + record + bytes(4)
        path.write_bytes(path.read_bytes() + framed + path.read_bytes())
        reader = EventReader(tmp_path)
        reader.update()
        reader.update()
        assert [p.step for p in reader.points] == [1]

    def test_a_link_is_not_followed(self, tmp_path):
        (tmp_path / "other").mkdir()
        EventFile(tmp_path / "other").add(1, {"steps/loss": 1.0})
        (tmp_path / EVENTS_FILE).symlink_to(tmp_path / "other" / EVENTS_FILE)
        reader = EventReader(tmp_path)
        reader.update()
        assert reader.points == []


class TestServer:
    def test_the_page_and_its_parts(self, run_dir):
        with serving(run_dir) as port:
            status, headers, text = ask(port)
            assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
            page = Page(text)
            status, headers, text = ask(port, "/live.json")
        assert status == 200 and headers["Content-Type"] == "application/json; charset=utf-8"
        live = json.loads(text)
        ids = [attrs["id"] for name, attrs, _ in page.elements if attrs.get("id") in live["parts"]]
        assert ids == list(live["parts"]) == ["state", "curves", "epochs", "log"]
        assert live["refresh_sec"] >= 2 and headers["Cache-Control"] == "no-store"

    def test_nothing_but_the_script_of_the_page_may_run(self, run_dir):
        with serving(run_dir) as port:
            _, headers, text = ask(port)
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
        assert policy["script-src"] == f"'sha256-{digest}'"
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Server"].strip() == "Lockstep"

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            (["localhost"], 200),
            (["LOCALHOST:9999"], 200),  # The other end of a tunnel.
            (["127.0.0.1"], 200),
            (["evil.example"], 403),
            (["evil.example:8060"], 403),
            (["127.0.0.1.evil.example"], 403),
            (["localhost@evil.example"], 403),
            (["127.0.0.1", "evil.example"], 403),
            (["localhost:x"], 403),
            ([""], 403),
            ([], 403),
        ],
    )
    def test_other_hosts_are_refused(self, run_dir, host, status):
        with serving(run_dir) as port:
            for path in ("/", "/live.json"):
                found, _, text = ask(port, path, host=host)
                assert found == status and ("step 15" in text) == (status == 200)

    @pytest.mark.parametrize(
        "path",
        [
            "/x", "/index.html", "/live.js", "/log.txt", "/../../etc/passwd", "/%2e%2e/log.txt",
            "//etc/passwd", "/?x", "/live.json/", "http://evil.example/x", "*",
        ],
    )  # fmt: skip
    def test_other_paths_are_not_found(self, run_dir, path):
        with serving(run_dir) as port:
            status, headers, text = ask(port, path)
        assert (status, text) == (404, "There is nothing at this path.\n")
        assert headers["Content-Type"] == "text/plain; charset=utf-8"

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"])
    def test_other_methods_are_refused(self, run_dir, method):
        with serving(run_dir) as port:
            status, headers, text = ask(port, method=method)
        assert status == 405 and headers["Allow"] == "GET" and "step" not in text

    def test_what_is_no_request_is_refused_and_the_page_goes_on(self, run_dir):
        with serving(run_dir) as port:
            for request in (b"\x00\xff\r\n\r\n", b"GET <b> / HTTP/1.1\r\n\r\n", b"x" * 70_000):
                with (
                    socket.create_connection(("127.0.0.1", port), 20) as connection,
                    contextlib.suppress(ConnectionError),
                ):
                    connection.sendall(request)
                    connection.shutdown(socket.SHUT_WR)
                    assert b"<b>" not in connection.recv(1 << 16)
            with socket.create_connection(("127.0.0.1", port), 20):  # It asks for nothing.
                assert ask(port)[0] == 200

    def test_it_listens_on_the_loopback_interface_alone(self, run_dir):
        with LiveServer(0, LivePage([run_dir])) as server:
            assert server.server_address[0] == "127.0.0.1" and "127.0.0.1" in server.url

    def test_a_port_that_is_in_use(self, run_dir, monkeypatch):
        page = LivePage([run_dir])
        with LiveServer(0, page) as server:
            port = server.server_address[1]
            with pytest.raises(ConfigError, match=f"^--port={port} is in use; choose another"):
                open_server(port, page)
            monkeypatch.setattr("app.report.live_server.DEFAULT_PORT", port)
            with open_server(None, page) as other:
                assert other.server_address[1] != port


class TestCommand:
    @pytest.mark.e2e
    def test_ctrl_c_ends_it_with_code_0(self, tmp_path):
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "main.py"), "report", "--watch"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=program_environment(),
        )  # fmt: skip
        with process:
            line = process.stdout.readline()
            port = int(re.fullmatch(r"runs: open http://127\.0\.0\.1:(\d+)/ .*\n", line)[1])
            assert "No training here yet" in ask(port)[2]
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in errors
        assert rest == "page closed; a training is not affected\n"

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--watch", "--out=x"], "--out=x has no effect with --watch"),
            (["x", "--port=8080"], "--port=8080 needs --watch"),
            (["--watch", "--port=0"], "--port must be between 1 and 65535, got 0"),
        ],
    )
    def test_what_is_refused(self, arguments, told):
        result = run_here("report", *arguments)
        assert result.returncode == 2 and told in result.stderr


@in_a_browser
class TestBrowser:
    def test_the_page_is_updated_without_a_complaint(self, tmp_path):
        dom, said = self.browse(GrowingPage(tmp_path / "run"), tmp_path)
        steps = int(re.search(r"step (\d+) of 40", dom)[1])
        assert steps > 3 and f"<title>{steps / 40:.0%} " in dom
        assert "CONSOLE" not in said and re.search(r'id="lost"[^>]* hidden', dom)

    def test_a_server_that_has_ended_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr(LiveServer, "handle_error", lambda *_: None)
        dom, _ = self.browse(GrowingPage(tmp_path / "run", last_step=3), tmp_path)
        assert "step 3 of 40" in dom and not re.search(r'id="lost"[^>]* hidden', dom)

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [360, 1280])
    def test_no_sideways_scroll(self, run_dir, tmp_path, width):
        page = LivePage([run_dir]).page()
        assert test_report.TestBrowser.scroll_width(page, tmp_path, width) == width

    @staticmethod
    def browse(page, folder):
        """Opens the page for ten seconds; returns its DOM, and what the browser said."""
        with serving(page=page) as port:
            result = subprocess.run(
                [
                    CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
                    "--disable-dev-shm-usage", "--disable-background-networking",
                    "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
                    "--virtual-time-budget=10000", "--dump-dom", f"http://127.0.0.1:{port}/",
                ],
                capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip
        return result.stdout, result.stderr


class GrowingPage(LivePage):
    """The page of a training that makes a step between two updates; then the server fails."""

    def __init__(self, run_dir, last_step=40):
        report_samples.write_running(run_dir, num_epochs=0, steps=()).close()
        super().__init__([run_dir])
        self.events, self.steps = EventFile(run_dir), iter(range(1, last_step + 1))

    def update(self):
        self.events.add(next(self.steps), {"steps/loss": 1.0, "steps/images_per_sec": 1.0})
        return super().update()
