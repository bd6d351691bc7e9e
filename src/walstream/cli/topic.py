"""`walstream topic`: the topics of a node."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from walstream.cli.client import Client
from walstream.cli.options import Confirm, command, confirm_name, pairs
from walstream.cli.output import Column, Output, plural
from walstream.errors import TopicExists, UsageError

app = typer.Typer(help="Create, list, describe, alter and delete topics.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
_EXAMPLE = "retention.ms=86400000"


@command(app, "create")
def create(
    name: Name,
    client: Client,
    output: Output,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", min=1, help="How many; otherwise the node's default.")
    ] = None,
    replication: Annotated[int | None, typer.Option(min=1, help="Copies of each partition.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=f"A setting, such as {_EXAMPLE}.")
    ] = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Be content when it exists already.")] = False,
) -> None:
    """Create a topic."""
    chosen = pairs(settings or [], "--set", _EXAMPLE)
    topic = NewTopic(name, partitions or -1, replication or -1, config=chosen)
    try:
        client.wait(client.admin().create_topics([topic], request_timeout=client.timeout_s)[name], f"topic {name}")
    except TopicExists:
        if not if_missing:
            raise TopicExists(f"Topic {name} exists already.", "--if-missing is content with that.") from None
        output.done(f"Topic {name} exists already.", {"topic": name, "created": False})
        return
    count = len(client.partitions(name))
    result = {"topic": name, "created": True, "partitions": count, "settings": chosen}
    output.done(f"Created topic {name} with {plural(count, 'partition')}.", result)


@command(app, "list")
def list_topics(
    client: Client,
    output: Output,
    internal: Annotated[bool, typer.Option("--internal", help="Also those the node keeps for itself.")] = False,
) -> None:
    """List the topics."""
    topics = client.metadata().topics
    chosen = {name: topics[name] for name in sorted(topics) if internal or not name.startswith("__")}
    bounds = client.bounds([(name, index) for name, topic in chosen.items() for index in topic.partitions])
    rows = [
        {
            "topic": name,
            "partitions": len(topic.partitions),
            "records": sum(end - start for (at, _), (start, end) in bounds.items() if at == name),
        }
        for name, topic in chosen.items()
    ]
    columns = (
        Column("topic", "topic"),
        Column("partitions", "partitions", "number"),
        Column("records", "records", "number"),
    )
    output.rows("topics", rows, columns, "There are no topics. `walstream topic create NAME` makes one.")


@command(app, "describe")
def describe(
    name: Name,
    client: Client,
    output: Output,
    all_settings: Annotated[bool, typer.Option("--all", help="Also the settings that have their default.")] = False,
) -> None:
    """Show the partitions and settings of a topic."""
    topic = client.metadata(name).topics[name]
    bounds = client.bounds([(name, index) for index in sorted(topic.partitions)])
    partitions = [
        {
            "partition": index,
            "leader": topic.partitions[index].leader,
            "replicas": list(topic.partitions[index].replicas),
            "in_sync": list(topic.partitions[index].isrs),
            "start_offset": start,
            "end_offset": end,
            "records": end - start,
        }
        for (_, index), (start, end) in bounds.items()
    ]
    settings = [row for row in _settings(client, name) if all_settings or row["source"] == "topic"]
    if not output.is_for_people:
        output.item({"topic": name, "partitions": partitions, "settings": settings}, ())
        return
    columns = (
        Column("partition", "partition", "number"),
        Column("leader", "leader"),
        Column("in_sync", "in sync"),
        Column("start_offset", "start", "number"),
        Column("end_offset", "end", "number"),
        Column("records", "records", "number"),
    )
    output.rows("partitions", partitions, columns, "")
    if settings:
        print()
        shown = (Column("name", "setting"), Column("value", "value"), Column("source", "source", "state"))
        output.rows("settings", settings, shown, "")


@command(app, "alter")
def alter(
    name: Name,
    client: Client,
    output: Output,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", min=1, help="Grow to this many; they never get fewer.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=f"A setting, such as {_EXAMPLE}.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="NAME", help="Return a setting to its default.")
    ] = None,
) -> None:
    """Change the settings of a topic, or give it more partitions."""
    chosen = pairs(settings or [], "--set", _EXAMPLE)
    if not (partitions or chosen or unset):
        raise UsageError("There is nothing to change.", "Say what with --partitions, --set or --unset.")
    client.metadata(name)
    about = f"topic {name}"
    if chosen or unset:
        changes = [_change(setting, value, AlterConfigOpType.SET) for setting, value in chosen.items()]
        changes += [_change(setting, None, AlterConfigOpType.DELETE) for setting in unset or []]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=changes)
        futures = client.admin().incremental_alter_configs([resource], request_timeout=client.timeout_s)
        client.wait(futures[resource], about)
    if partitions:
        grown = client.admin().create_partitions([NewPartitions(name, partitions)], request_timeout=client.timeout_s)
        client.wait(grown[name], about)
    result = {"topic": name, "partitions": partitions, "set": chosen, "unset": list(unset or [])}
    output.done(f"Altered topic {name}.", result)


@command(app, "delete")
def delete(name: Name, client: Client, output: Output, confirm: Confirm = None) -> None:
    """Delete a topic and everything in it."""
    partitions = client.partitions(name)
    records = sum(end - start for start, end in client.bounds([(name, index) for index in partitions]).values())
    confirm_name(name, confirm, f"This deletes topic {name} and its {plural(records, 'record')} for good.")
    client.wait(client.admin().delete_topics([name], request_timeout=client.timeout_s)[name], f"topic {name}")
    output.done(f"Deleted topic {name}.", {"topic": name, "deleted": True, "records": records})


def _settings(client: Client, name: str) -> list[dict[str, Any]]:
    resource = ConfigResource(ResourceType.TOPIC, name)
    futures = client.admin().describe_configs([resource], request_timeout=client.timeout_s)
    entries: dict[str, ConfigEntry] = client.wait(futures[resource], f"topic {name}")
    is_own = ConfigSource.DYNAMIC_TOPIC_CONFIG
    return [
        {
            "name": entry.name,
            "value": entry.value,
            "source": "topic" if ConfigSource(entry.source) is is_own else "default",
        }
        for entry in sorted(entries.values(), key=lambda entry: entry.name)
    ]


def _change(setting: str, value: str | None, act: AlterConfigOpType) -> ConfigEntry:
    return ConfigEntry(setting, value, incremental_operation=act)
