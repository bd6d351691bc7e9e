"""The configuration: which source wins, where a value came from, and what an error says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from walstream.config import (
    AclRule,
    ClusterNode,
    Config,
    LeaderRule,
    ReplicationConfig,
    StreamRule,
    TableRule,
    allowed,
    environment_name,
    fields,
    load,
    reference,
    rules,
    sections,
    template,
    value_of,
)
from walstream.config.reference import show
from walstream.error_codes import codes
from walstream.errors import ConfigError

ROOT = Path(__file__).parents[1]


def write(folder: Path, text: str) -> Path:
    file = folder / "walstream.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refuse(file: Path | None = None, environ: dict[str, str] | None = None, **overrides: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(file, environ, {key.replace("__", "."): value for key, value in overrides.items()})
    return caught.value


def test_defaults_are_themselves_allowed() -> None:
    loaded = load()
    assert loaded.config == Config()
    for name, field in fields():
        if isinstance(field.default, str | int):
            assert load(overrides={name: field.default}).config == loaded.config, name


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[node]\nlisten = "127.0.0.1:1"\ndata = "a"\nnode_id = 7\n')
    environ = {"WALSTREAM_NODE__LISTEN": "127.0.0.1:2", "WALSTREAM_NODE__DATA": "b"}
    loaded = load(file, environ, {"node.listen": "127.0.0.1:3"})
    assert (loaded.config.node.listen, loaded.config.node.data, loaded.config.node.node_id) == ("127.0.0.1:3", "b", 7)
    assert str(loaded.origins["node.listen"]) == "flag node.listen=127.0.0.1:3"
    assert str(loaded.origins["node.data"]) == "environment WALSTREAM_NODE__DATA"
    assert str(loaded.origins["node.node_id"]) == f"file {file}"
    assert str(loaded.origins["log.segment_bytes"]) == "default"


def test_every_key_has_an_origin_and_an_environment_variable() -> None:
    loaded = load()
    names = [name for name, _ in fields()]
    assert list(loaded.origins) == names
    assert environment_name("log.segment_bytes") == "WALSTREAM_LOG__SEGMENT_BYTES"
    assert len({environment_name(name) for name in names}) == len(names)


def test_environment_without_a_section_is_somebody_elses() -> None:
    environ = {"WALSTREAM_BOOTSTRAP": "x", "WALSTREAM_TEST_ROUNDS": "full", "PATH": "/bin", "OTHER__KEY": "1"}
    assert load(environ=environ).config == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("", ()), ("PLAIN", ("PLAIN",)), ("PLAIN, SCRAM-SHA-512", ("PLAIN", "SCRAM-SHA-512")), ('["PLAIN"]', ("PLAIN",))],
)
def test_a_list_as_text(text: str, value: tuple[str, ...]) -> None:
    environ = {"WALSTREAM_SECURITY__SASL_MECHANISMS": text}
    assert load(environ=environ).config.security.sasl_mechanisms == value


def test_tables(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [security]
        [security.users]
        ann = "SCRAM-SHA-256$…"
        bob = ["SCRAM-SHA-256$…", "SCRAM-SHA-512$…"]
        [[security.acls]]
        principal = "ann"
        kind = "topic"
        name = "orders.*"
        operations = ["read", "write"]
        """,
    )
    security = load(file).config.security
    assert security.users == {"ann": "SCRAM-SHA-256$…", "bob": ("SCRAM-SHA-256$…", "SCRAM-SHA-512$…")}
    assert security.acls[0].operations == ("read", "write")
    rule = '[{"principal": "ann", "kind": "topic", "name": "orders.*", "operations": ["read", "write"]}]'
    assert load(environ={"WALSTREAM_SECURITY__ACLS": rule}).config.security.acls == security.acls


STREAM = {"table": "public.*", "operations": ["insert", "update"], "topic": "{prefix}.all", "key": ["id"]}


class TestNestedSections:
    def test_each_source_reaches_them(self, tmp_path: Path) -> None:
        file = write(
            tmp_path, '[source.postgres]\nhost = "a"\nport = 1\ndatabase = "b"\n[capture.security]\ntls = true\n'
        )
        loaded = load(file, {"WALSTREAM_SOURCE__POSTGRES__PORT": "2"}, {"source.postgres.database": "c"})
        postgres = loaded.config.source.postgres
        assert (postgres.host, postgres.port, postgres.database) == ("a", 2, "c")
        assert loaded.config.capture.security.tls is True
        assert str(loaded.origins["source.postgres.host"]) == f"file {file}"
        assert str(loaded.origins["source.postgres.port"]) == "environment WALSTREAM_SOURCE__POSTGRES__PORT"
        assert str(loaded.origins["source.postgres.database"]) == "flag source.postgres.database=c"
        assert str(loaded.origins["capture.prefix"]) == "default"

    def test_value_by_its_name(self) -> None:
        assert value_of(load(overrides={"source.postgres.port": 7}).config, "source.postgres.port") == 7

    def test_unknown_names(self, tmp_path: Path) -> None:
        assert refuse(write(tmp_path, "[source.postgre]\n")).hint == "Did you mean source.postgres?"
        assert refuse(write(tmp_path, "[source.postgres]\nhosts = 1\n")).hint == "Did you mean source.postgres.host?"
        assert refuse(environ={"WALSTREAM_POSTGRES__HOST": "x"}).hint == "Did you mean source.postgres?"
        assert "written as [source.postgres]" in refuse(write(tmp_path, "source.postgres = 5\n")).message

    def test_sections_and_lists_of_tables_are_found_in_the_models(self) -> None:
        assert {"node", "source", "source.postgres", "capture", "capture.security"} <= {name for name, _ in sections()}
        assert rules() == {
            "security.acls": AclRule,
            "replication.nodes": ClusterNode,
            "replication.leaders": LeaderRule,
            "pipeline.tables": TableRule,
            "streams": StreamRule,
        }


class TestPipelineTables:
    def test_each_has_a_section_of_its_own(self, tmp_path: Path) -> None:
        text = """
        [pipeline.tables."public.orders"]
        mode = "history"
        strings = ["at"]
        [pipeline.tables."a.b.c"]
        mode = "append"
        """
        tables = load(write(tmp_path, text)).config.pipeline.tables
        assert tables == {
            "public.orders": TableRule(mode="history", strings=("at",)),
            "a.b.c": TableRule(mode="append"),
        }
        given = '{"public.orders": {"mode": "history"}}'
        assert (
            load(environ={"WALSTREAM_PIPELINE__TABLES": given}).config.pipeline.tables["public.orders"].mode
            == "history"
        )
        assert "mode" in refuse(pipeline__tables={"public.orders": {"mode": "mirorr"}}).message

    def test_settings_of_spark_keep_their_dots(self, tmp_path: Path) -> None:
        text = '[pipeline.settings]\n"spark.executor.memory" = "4g"\n'
        assert load(write(tmp_path, text)).config.pipeline.settings == {"spark.executor.memory": "4g"}


NODES = [
    {"id": number, "kafka": f"n{number}.example.org:9092", "replication": f"n{number}.example.org:9192"}
    for number in (1, 2, 3)
]


def replication(**settings: object) -> ReplicationConfig:
    overrides = {f"replication.{name}": value for name, value in settings.items()}
    return load(overrides={"replication.nodes": NODES, **overrides}).config.replication


class TestReplication:
    def test_without_nodes_there_is_no_cluster(self) -> None:
        assert not load().config.replication.is_cluster
        assert not replication(nodes=NODES[:1]).is_cluster
        assert replication().is_cluster

    def test_as_tables_and_as_json(self, tmp_path: Path) -> None:
        text = """
        [replication]
        secret_env = "SECRET"
        [[replication.nodes]]
        id = 1
        kafka = "a:9092"
        replication = "a:9192"
        [[replication.leaders]]
        topics = "orders.*"
        node = 1
        """
        found = load(write(tmp_path, text)).config.replication
        assert found.nodes == (ClusterNode(id=1, kafka="a:9092", replication="a:9192"),)
        assert found.leaders == (LeaderRule(topics="orders.*", node=1),)
        given = json.dumps(NODES)
        assert load(environ={"WALSTREAM_REPLICATION__NODES": given}).config.replication.nodes[2].id == 3

    def test_leaders_by_pattern_and_the_controller_for_the_rest(self) -> None:
        rules = [{"topics": "a.b", "node": 3}, {"topics": "a.*", "node": 2}]
        found = replication(leaders=rules, controller_id=3)
        assert [found.leader_of(name) for name in ("a.b", "a.c", "a", "b")] == [3, 2, 3, 3]
        assert replication().leader_of("anything") == 1

    def test_followers_come_after_their_leader(self) -> None:
        found = replication(leaders=[{"topics": "a*", "node": 2}])
        assert found.replicas_of("a", 2) == (2, 3)
        assert found.replicas_of("a", 9) == (2, 3, 1)
        assert found.replicas_of("b", 1) == (1,)

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"nodes": [*NODES, NODES[0]]}, "the same id"),
            ({"controller_id": 9}, "9 is not one of replication.nodes"),
            ({"leaders": [{"topics": "a", "node": 9}]}, "gives a to 9"),
            ({"tls_ca": "ca.pem"}, "together or not at all"),
            ({"heartbeat_timeout_ms": 10_000}, "less than two of"),
            ({"nodes": NODES[1:]}, "does not have this node, node.node_id = 1"),
        ],
    )
    def test_contradictions(self, settings: dict[str, object], said: str) -> None:
        given = {"replication__nodes": NODES, **{f"replication__{name}": value for name, value in settings.items()}}
        assert said in refuse(**given).message


class TestStreams:
    def test_as_tables_as_json_and_as_a_flag(self, tmp_path: Path) -> None:
        text = """
        [[streams]]
        table = "public.*"
        operations = ["insert", "update"]
        topic = "{prefix}.all"
        key = ["id"]
        [[streams]]
        table = "shop.outbox"
        format = "outbox"
        """
        first, second = load(write(tmp_path, text)).config.streams
        assert first == StreamRule(table="public.*", operations=("insert", "update"), topic="{prefix}.all", key=("id",))
        assert (second.format, second.outbox_payload_column) == ("outbox", "payload")
        assert load(environ={"WALSTREAM_STREAMS": json.dumps([STREAM])}).config.streams == (first,)
        assert load(overrides={"streams": [STREAM]}).config.streams == (first,)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"operations": ["upsert"]}, "0.operations.0"),
            ({"topic": "{shema}.x"}, "{shema} is none of {prefix}, {schema}, {table}, {route}"),
            ({"topic": "a b"}, "a topic name has letters"),
            ({"topic": "{route}"}, "{route} in topic needs format = outbox"),
            ({"tabel": "x"}, "0.tabel"),
        ],
    )
    def test_a_wrong_one_says_what_is_wrong(self, change: dict[str, object], said: str) -> None:
        assert said in refuse(streams=[{**STREAM, **change}]).message

    def test_headers_that_capture_writes_are_refused(self) -> None:
        for name in ("tenant", "gen", "__debezium.newkey"):
            refused = refuse(streams=[{**STREAM, "outbox_header_columns": ["trace", name]}])
            assert f"{name}: capture writes a header of that name" in refused.message

    def test_tenant(self) -> None:
        assert load(overrides={"capture.tenant": "column:owner"}).config.capture.tenant == "column:owner"
        assert "needs the name of a column" in refuse(capture__tenant="column:").message


def test_booleans_as_text() -> None:
    assert load(environ={"WALSTREAM_LOG__AUTO_CREATE_TOPICS": "false"}).config.log.auto_create_topics is False
    assert load(overrides={"security.allow_insecure": "true"}).config.security.allow_insecure is True


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().config.node.listen = "elsewhere"  # type: ignore[misc]


class TestErrors:
    def test_exit_code_is_that_of_usage(self) -> None:
        assert codes(refuse(node__port=1)).exit == 2

    def test_unknown_key_names_the_nearest(self, tmp_path: Path) -> None:
        error = refuse(write(tmp_path, "[log]\nsegment_byte = 1\n"))
        assert error.message.startswith("Unknown key log.segment_byte (file ")
        assert error.hint == "Did you mean log.segment_bytes?"

    def test_key_of_another_section(self) -> None:
        assert refuse(log__listen="127.0.0.1:1").hint == "Did you mean node.listen?"

    def test_unknown_section(self, tmp_path: Path) -> None:
        assert refuse(write(tmp_path, "[limit]\n")).hint == "Did you mean limits?"
        assert refuse(environ={"WALSTREAM_NODES__LISTEN": "x"}).hint == "Did you mean node?"

    def test_wrong_type_says_key_value_source_and_what_is_allowed(self) -> None:
        error = refuse(environ={"WALSTREAM_LOG__SEGMENT_BYTES": "128MB"})
        assert "log.segment_bytes = '128MB' (environment WALSTREAM_LOG__SEGMENT_BYTES)" in error.message
        assert error.hint == "Allowed: integer from 1,024 to 2,147,483,647."

    @pytest.mark.parametrize("value", ['"1048576"', "1048576.5", "true", "[1]"])
    def test_a_file_has_numbers_where_numbers_belong(self, tmp_path: Path, value: str) -> None:
        assert "log.segment_bytes" in refuse(write(tmp_path, f"[log]\nsegment_bytes = {value}\n")).message

    def test_out_of_range(self) -> None:
        error = refuse(node__node_id=-1)
        assert "node.node_id = -1" in error.message
        assert "greater than or equal to 0" in error.message

    def test_choice(self) -> None:
        assert refuse(node__log_level="loud").hint == "Allowed: debug | info | warning | error."

    def test_address_without_port(self) -> None:
        assert refuse(node__listen="localhost").hint == "Allowed: host:port."

    def test_a_wrong_rule_says_which_part(self) -> None:
        rule = '[{"principal": "ann", "kind": "topic", "operations": ["raed"]}]'
        assert "0.operations.0" in refuse(environ={"WALSTREAM_SECURITY__ACLS": rule}).message

    def test_broken_json(self) -> None:
        assert "is not valid JSON" in refuse(environ={"WALSTREAM_SECURITY__ACLS": "[{"}).message

    def test_a_credential_is_never_repeated(self) -> None:
        error = refuse(environ={"WALSTREAM_SECURITY__USERS": '{"ann": 12345}'})
        assert "12345" not in str(error)
        assert "hunter2" not in repr(load(overrides={"security.users": {"ann": "hunter2"}}).config)

    def test_contradictions(self) -> None:
        assert "tls_certificate and tls_key" in refuse(security__tls_key="key.pem").message
        assert "never arrives" in refuse(log__message_bytes_max=2**30).message
        assert "never fits" in refuse(limits__request_bytes_max=2**30).message
        assert "user and password_env" in refuse(capture__security__user="ann").message
        assert "group_session_timeout_ms_min" in refuse(limits__group_session_timeout_ms_min=10**9).message

    def test_file_that_is_not_there(self, tmp_path: Path) -> None:
        assert "No such file" in refuse(tmp_path / "none.toml").message

    def test_file_that_is_not_toml(self, tmp_path: Path) -> None:
        assert "is not valid TOML" in refuse(write(tmp_path, "[node")).message

    def test_section_that_is_a_value(self, tmp_path: Path) -> None:
        assert "written as [node]" in refuse(write(tmp_path, "node = 1\n")).message


class TestReference:
    def test_every_field_is_described(self) -> None:
        for name, field in fields():
            assert field.description, name
            assert field.description.endswith("."), name
            assert allowed(name), name

    def test_numbers_have_their_unit_in_the_name(self) -> None:
        counted = (
            "_bytes",
            "_ms",
            "_s",
            "_minutes",
            "_hours",
            "_max",
            "_min",
            "_id",
            "partitions",
            "_workers",
            "_limit",
            ".port",
            # Numbers of replicas, under the names that Kafka and the settings of other systems have taught.
            "_isr",
            "_factor",
            "_followers",
            "_size",
            "_per_s",
        )
        for name, field in fields():
            if field.annotation is int:
                assert name.endswith(counted), name

    def test_page_is_not_stale(self) -> None:
        written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
        assert written == reference(), "run `make docs`"

    def test_values_are_shown_as_toml(self) -> None:
        assert show(True) == "true"
        assert (show(5432), show(1048576)) == ("5432", "1_048_576")
        assert show('a"b\\c') == r'"a\"b\\c"'
        assert show({"ann": "x"}) == '{ann = "x"}'
        assert show({"public.orders": 1}) == '{"public.orders" = 1}'
        assert show(("a", "b")) == '["a", "b"]'


class TestTemplate:
    def test_as_written_it_changes_nothing(self, tmp_path: Path) -> None:
        assert load(write(tmp_path, template(load()))).config == Config()

    def test_without_its_hashes_it_is_the_defaults(self) -> None:
        text = re.sub(r"^# (\[|[a-z0-9_]+ = )", r"\1", template(load()), flags=re.MULTILINE)
        for name, rule in rules().items():
            # One rule of each list is shown, with nothing for what has no default; the empty list is there too.
            text = re.sub(rf"^{name.split('.')[-1]} = (\[\]|{{}})\n", "", text, count=1, flags=re.MULTILINE)
            for key, field in rule.model_fields.items():
                assert f"{key} = " in text
                assert field.description
        document = tomllib.loads(text)
        for name, field in fields():
            found: object = document
            for part in name.split("."):
                found = found[part]  # type: ignore[index]
            if name not in rules():
                assert found == (list(field.default) if isinstance(field.default, tuple) else field.default), name

    def test_what_was_changed_is_set(self, tmp_path: Path) -> None:
        overrides = {
            "source.postgres.database": 'a "quoted" name',
            "capture.partitions": 3,
            "pipeline.tables": {"public.orders": {"mode": "append"}},
            "pipeline.settings": {"spark.executor.memory": "4g"},
            "streams": [STREAM],
        }
        changed = load(overrides=overrides)
        again = load(write(tmp_path, template(changed)))
        assert again.config == changed.config
        assert {name for name, origin in again.origins.items() if origin.source == "file"} == set(overrides)

    def test_lines_are_short(self) -> None:
        assert max(len(line) for line in template(load()).splitlines()) <= 120
