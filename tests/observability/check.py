#!/usr/bin/env python3
"""Check the alerts and the dashboard against a real Prometheus that scrapes a small cluster under load.

    tests/observability/check.py --binaries target/debug [--seconds 25]

1. promtool checks the rules and the configuration, and runs alerts_test.yml. Every alert needs a test in
   which it fires, one in which it does not, and a section in the runbook.
2. The dashboard is parsed with Grafana's own types (PyPI: grafana-foundation-sdk) and serialized again. A
   field that these types do not have is an error, except in a panel's `custom` options. Grafana itself is
   not run, because it is not in the registries that this repository uses.
3. A router, a target worker and a draft worker serve the bundled pair under load. Prometheus scrapes them
   with deploy/observability/prometheus.yml (with other addresses, shorter intervals, and the labels of a
   release; promtool tests the alerts without these, too). Every query of
   every panel and of the Helm chart's scaling must return data. No alert may be pending, except those in
   MAY_BE_PENDING, and each side of its comparisons must return data. MAY_BE_EMPTY lists the queries that may
   be empty, with the reason.
4. Another Prometheus applies the relabeling rules of prometheus-kubernetes.yml to example pods, which must
   get the job names and labels that the alerts use.
"""

import argparse
import contextlib
import itertools
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/programs"))

from ports import free_port  # noqa: E402

OBSERVABILITY = ROOT / "deploy/observability"
TIMEOUT_SECONDS = 120
SCRAPE_INTERVAL = "1s"
# Value of $__rate_interval: that of Grafana at this scrape interval, plus a margin for a busy machine.
RATE_INTERVAL = "20s"
# Labels that a Prometheus on Kubernetes adds.
RELEASE = {"namespace": "llm", "release": "demo"}
CLIENTS = 3
DISCOVERY_TIMEOUT_SECONDS = 30

# Queries that may return no data in a healthy cluster, with the reason. It is also an error if one of them
# returns data, so that the list stays short.
MAY_BE_EMPTY = {
    "OutriderDraftsRaiseTailLatency, side 2": "a baseline of hours in which nothing was drafted",
    "OutriderCertificateExpires, side 1": "processes with certificates",
    "OutriderConnectionsRefused, side 1": "connections that were refused",
}

# Alerts that depend on the speed of this machine. They may be pending during the check; they fire only after
# several minutes.
MAY_BE_PENDING = {"OutriderDraftsMissDeadline", "OutriderSlowFirstTokens"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, required=True, help="directory of the server binaries")
    parser.add_argument("--seconds", type=float, default=25, help="duration of the load before the queries are run")
    settings = parser.parse_args()
    for program in ("prometheus", "promtool"):
        if not shutil.which(program):
            print(f"skipped: {program} is not installed (Debian: apt-get install prometheus)")
            return
    alerts = [rule for group in read_yaml("alerts.yml")["groups"] for rule in group["rules"]]
    dashboard = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())
    errors = promtool_errors() + coverage_errors(alerts) + dashboard_errors(dashboard)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        http = start_cluster(stack, settings.binaries, pathlib.Path(folder))
        prometheus = start_prometheus(stack, pathlib.Path(folder), http)
        run_clients(http["router"], settings.seconds)
        errors += query_errors(prometheus, panel_queries(dashboard) + scaling_queries())
        errors += alert_errors(prometheus, alerts)
        errors += kubernetes_errors(stack, pathlib.Path(folder))
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(bool(errors))


def read_yaml(name):
    return yaml.safe_load((OBSERVABILITY / name).read_text())


# Checks without a cluster.


def promtool_errors():
    errors = []
    checks = (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"],
              ["test", "rules", "alerts_test.yml"])
    for arguments in checks:
        run = subprocess.run(["promtool", *arguments], cwd=OBSERVABILITY, capture_output=True, text=True)
        print(f"promtool {' '.join(arguments)}: {'ok' if run.returncode == 0 else 'failed'}")
        if run.returncode:
            errors.append(f"promtool {' '.join(arguments)}: {run.stdout}{run.stderr}")
    return errors


def coverage_errors(alerts):
    """Checks that every alert fires in one test, stays silent in another, and is in the runbook, and that
    every test names an existing alert."""
    cases = [case for test in read_yaml("alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    names = {alert["alert"] for alert in alerts}
    runbook = (ROOT / "docs/runbook.md").read_text()
    errors = [f"alerts_test.yml tests {case['alertname']}, which is not an alert" for case in cases if case["alertname"] not in names]
    for name in sorted(names):
        fires = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == name]
        errors += [f"{name}: no test in which it {behaviour}" for behaviour, does_fire in (("fires", True), ("stays silent", False)) if does_fire not in fires]
        if f"\n## {name}\n" not in runbook:
            errors.append(f"{name}: no section in docs/runbook.md")
    print(f"{len(names)} alerts with {len(cases)} tests")
    return errors


def dashboard_errors(dashboard):
    serialized = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    errors = [f"dashboard: {error}" for error in lost_fields(dashboard, serialized, "")]
    print(f"dashboard: {len(dashboard['panels'])} panels parsed with Grafana's types, {len(errors)} errors")
    return errors


def lost_fields(original, parsed, path):
    if isinstance(original, dict) and isinstance(parsed, dict):
        lost = [f"{path}.{key} is not a field of Grafana's types" for key in original.keys() - parsed.keys()]
        return lost + [error for key in original.keys() & parsed.keys() for error in lost_fields(original[key], parsed[key], f"{path}.{key}")]
    if isinstance(original, list) and isinstance(parsed, list) and len(original) == len(parsed):
        return [error for i, pair in enumerate(zip(original, parsed)) for error in lost_fields(*pair, f"{path}[{i}]")]
    return [] if original == parsed else [f"{path} is parsed as {parsed!r}"]


# Processes.


def start_cluster(stack, binaries, folder):
    """Starts the bundled pair on free ports. Returns the router's URL and the admin port of each process."""
    target, draft, router = ((free_port(), free_port()) for _ in range(3))
    http = free_port()
    workers = folder / "workers.toml"
    workers.write_text("".join(f'[[worker]]\nrole = "{role}"\naddress = "http://127.0.0.1:{ports[0]}"\n'
                               for role, ports in (("target", target), ("draft", draft))))
    for role, (grpc, admin) in (("target", target), ("draft", draft)):
        start(stack, folder, binaries / f"outrider-{role}-worker", f"--model={ROOT / 'models/demo' / role}", f"--listen=127.0.0.1:{grpc}",
              f"--admin=127.0.0.1:{admin}", f"--discovery=static:{workers}", "--threads=1")
        wait_ready(f"http://127.0.0.1:{admin}/health/ready")
    start(stack, folder, binaries / "outrider-router", f"--http=127.0.0.1:{http}", f"--grpc=127.0.0.1:{router[0]}",
          f"--admin=127.0.0.1:{router[1]}", f"--discovery=static:{workers}")
    wait_ready(f"http://127.0.0.1:{router[1]}/health/ready")
    return {"router": f"http://127.0.0.1:{http}", "admin": {"router": router[1], "target": target[1], "draft": draft[1]}}


def start_prometheus(stack, folder, http):
    """Starts Prometheus with the shipped configuration. Only addresses and intervals differ."""
    config = read_yaml("prometheus.yml")
    config["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL}
    config["rule_files"] = [str(OBSERVABILITY / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        role = next(role for role in http["admin"] if role in job["job_name"].removeprefix("outrider-"))
        job["static_configs"] = [{"targets": [f"127.0.0.1:{http['admin'][role]}"], "labels": RELEASE}]
    return run_prometheus(stack, folder / "prometheus", config)


def run_prometheus(stack, folder, config):
    folder.mkdir()
    config_file, port = folder / "prometheus.yml", free_port()
    config_file.write_text(yaml.safe_dump(config))
    start(stack, folder, shutil.which("prometheus"), f"--config.file={config_file}", f"--storage.tsdb.path={folder / 'tsdb'}",
          f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn")
    wait_ready(f"http://127.0.0.1:{port}/-/ready")
    return f"http://127.0.0.1:{port}"


def kubernetes_errors(stack, folder):
    """Checks that prometheus-kubernetes.yml gives the pods of the chart and of the plain manifests the job
    names and labels that the alerts use. Debian's Prometheus has no Kubernetes discovery, so its labels are
    set here; the relabeling rules are the real ones."""
    annotations = {"__meta_kubernetes_pod_annotation_prometheus_io_scrape": "true", "__meta_kubernetes_pod_annotation_prometheus_io_port": "8111"}
    annotations["__meta_kubernetes_namespace"] = RELEASE["namespace"]

    def chart(pool):
        return {"__meta_kubernetes_pod_label_outrider_pool": pool, "__meta_kubernetes_pod_label_app_kubernetes_io_instance": RELEASE["release"]}

    def plain(app):
        return {"__meta_kubernetes_pod_label_app": app}

    pods = {
        "10.0.0.1:8000": chart("router"), "10.0.0.2": chart("target-main"), "10.0.0.3:1": chart("draft-ngram"),
        "10.0.0.4": plain("outrider-router"), "10.0.0.5": plain("outrider-draft-worker"), "10.0.0.6": plain("outrider-target-nodes"),
        "10.0.0.7": plain("outrider-etcd"), "[fd00::8]:8000": plain("outrider-router"), "10.0.0.10": plain("something-else"),
        "10.0.0.9": {**plain("outrider-router"), "__meta_kubernetes_pod_phase": "Failed"},
    }
    config = read_yaml("prometheus-kubernetes.yml")
    (job,) = config["scrape_configs"]
    del job["kubernetes_sd_configs"], config["rule_files"]
    job["static_configs"] = [{"targets": [address], "labels": {**annotations, **labels}} for address, labels in pods.items()]
    prometheus = run_prometheus(stack, folder / "kubernetes", config)
    jobs = ("router", "target-worker", "draft-worker", "router", "draft-worker", "target-worker")
    expected = {f"http://10.0.0.{i}:8111/metrics": (f"outrider-{job}", RELEASE["namespace"], RELEASE["release"] if i <= 3 else None)
                for i, job in enumerate(jobs, 1)}
    expected["http://[fd00::8]:8111/metrics"] = ("outrider-router", RELEASE["namespace"], None)
    # Prometheus has no targets in its first seconds.
    start_time, found = time.monotonic(), None
    while found != expected and time.monotonic() - start_time < DISCOVERY_TIMEOUT_SECONDS:
        time.sleep(0.2)
        targets = request_json(f"{prometheus}/api/v1/targets")["data"]["activeTargets"]
        found = {target["scrapeUrl"]: tuple(target["labels"].get(name) for name in ("job", *RELEASE)) for target in targets}
    print(f"prometheus-kubernetes.yml: {len(found)} pods of {len(pods)} are scraped")
    return [] if found == expected else [f"prometheus-kubernetes.yml finds {found} instead of {expected}"]


def start(stack, folder, *command):
    name = pathlib.Path(command[0]).name
    log = stack.enter_context(open(folder / f"{name}.log", "w"))
    try:
        # The servers exit when their standard input closes, so none outlives this check.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
    except FileNotFoundError as error:
        raise SystemExit(f"{error.filename} is missing: cargo build --locked --workspace --bins") from error
    stack.callback(process.wait)
    stack.callback(process.terminate)


def wait_ready(url):
    start_time = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS):
                return
        except OSError as error:
            if time.monotonic() - start_time > TIMEOUT_SECONDS:
                raise SystemExit(f"{url}: {error}") from error
            time.sleep(0.1)


# Load.


def run_clients(router, seconds):
    """Runs clients that send one request after another, streamed or not, with the lane's k or a fixed k.
    Exits if a request fails."""
    deadline, failures = time.monotonic() + seconds, []
    completed = itertools.count()
    threads = [threading.Thread(target=client, args=(router, i, deadline, completed, failures)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"a request failed: {failures[0]}")
    print(f"load: {next(completed)} requests by {CLIENTS} clients in {seconds:.0f} s")


def client(router, index, deadline, completed, failures):
    for i in itertools.count():
        if time.monotonic() > deadline or failures:
            return
        body = {
            "model": "target", "max_tokens": 48, "seed": i, "temperature": (0, 0.7)[i % 2], "stream": i % 3 == 0,
            "messages": [{"role": "user", "content": f"Write a SQL query that counts the orders of customer {index * 1000 + i}."}],
            "speculation": {} if i % 4 == 0 else {"num_draft_tokens": 2},
        }
        request = urllib.request.Request(f"{router}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                answer.read()
            next(completed)
        except urllib.error.HTTPError as error:
            failures.append(f"{error}: {error.read().decode()}")
        except OSError as error:
            failures.append(str(error))


# Queries.


def panel_queries(dashboard):
    return [
        (f"panel {panel['title']}, {target['refId']}", target["expr"].replace("$__rate_interval", RATE_INTERVAL))
        for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]


def scaling_queries():
    """Returns the queries of the Helm chart's KEDA objects."""
    templates = ROOT / "deploy/helm/templates"
    (template,) = re.findall(r'query: {{ printf "((?:[^"\\]|\\.)*)"', (templates / "keda.yaml").read_text())
    metrics = re.findall(r'"metric" "(\w+)"', (templates / "_helpers.tpl").read_text())
    expression = template.replace("=~%q", '=~".+"').replace("%v", "1")
    for label, value in RELEASE.items():
        expression = expression.replace(f"{label}=%q", f'{label}="{value}"')
    return [(f"scaling by {metric}", expression.replace("%s", metric)) for metric in metrics]


def query_errors(prometheus, queries):
    errors = []
    for name, expression in queries:
        values = query(prometheus, expression)
        has_data = any(math.isfinite(value) for value in values)
        if not has_data and name not in MAY_BE_EMPTY:
            errors.append(f"{name} returns {values or 'no data'}: {expression}")
        if has_data and name in MAY_BE_EMPTY:
            errors.append(f"{name} is listed in MAY_BE_EMPTY but returned data")
        shown = f" ({values[0]:.3g})" if len(values) == 1 else ""
        print(f"  {name}: {len(values)} series{shown}" + (f" (empty: {MAY_BE_EMPTY[name]})" if name in MAY_BE_EMPTY else ""))
    return errors


def alert_errors(prometheus, alerts):
    errors = []
    for alert in alerts:
        values = query(prometheus, alert["expr"])
        if values and alert["alert"] in MAY_BE_PENDING:
            print(f"  {alert['alert']} is pending on this machine: {values}")
        elif values:
            errors.append(f"{alert['alert']} is pending in a healthy cluster: {values}")
        sides = operands(alert["expr"])
        named = [(f"{alert['alert']}, side {i + 1}", side) for i, side in enumerate(sides)]
        errors += query_errors(prometheus, named)
    groups = request_json(f"{prometheus}/api/v1/rules")["data"]["groups"]
    unhealthy = [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]
    return errors + [f"Prometheus cannot evaluate {name}" for name in unhealthy]


def operands(expression):
    """Returns the operands of an alert's outermost comparisons, without constants and without the labels by
    which they are matched."""
    expression = " ".join(expression.split())
    sides, depth, start = [], 0, 0
    for match in re.finditer(r"[({\[]|[)}\]]|\"[^\"]*\"| (?:==|!=|>=|<=|>|<|and|unless) ", expression):
        token = match.group()
        if token in "({[":
            depth += 1
        elif token in ")}]":
            depth -= 1
        elif depth == 0 and not token.startswith('"'):
            sides.append(expression[start:match.start()])
            start = match.end()
    sides.append(expression[start:])
    sides = [re.sub(r"^on \([^)]*\) ", "", side.strip()) for side in sides]
    return [side for side in sides if not re.fullmatch(r"[0-9.]+", side)]


def query(prometheus, expression):
    answer = request_json(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def request_json(url):
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error.read().decode()}") from error


if __name__ == "__main__":
    main()
