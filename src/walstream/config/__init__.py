"""The one typed configuration: what can be set, its default, its unit, and where each value came from.

Three sources, the later ones winning: a TOML file, the environment (`WALSTREAM_SECTION__KEY`), flags. Units are in the
names; sizes and durations are plain integers. The models are the reference: `docs/configuration.md` is generated from
their docstrings, and so is the file that `walstream init` writes.

    section.py   what all sections share
    node.py      [node] [log] [limits] [security]
    replication.py [replication], the nodes of a static cluster
    capture.py   [source.postgres] [capture] [[streams]]
    pipeline.py  [pipeline], and what differs for single tables
    replica.py   [pipeline.replica]
    feed.py      [feed] [feed.auth] [feed.tls]
    loading.py   the whole, and how the sources are merged into it
    reference.py the configuration in words

pydantic alone does the checking; pydantic-settings merges sources too, but forgets which of them a value came from.
"""

from walstream.config.capture import (
    RESERVED_HEADERS,
    ROW_OPERATIONS,
    CaptureConfig,
    CaptureSecurityConfig,
    PostgresConfig,
    RowFormat,
    RowOperation,
    SourceConfig,
    StreamRule,
    is_reserved_header,
)
from walstream.config.feed import ClientAuth, FeedAuthConfig, FeedConfig, FeedTlsConfig
from walstream.config.loading import (
    DEFAULT_FILE,
    ENVIRONMENT_PREFIX,
    Config,
    Loaded,
    Origin,
    allowed,
    environment_name,
    fields,
    load,
    load_default,
    reference,
    rules,
    sections,
    template,
    value_of,
)
from walstream.config.node import (
    NODE_SECTIONS,
    AclRule,
    LimitsConfig,
    LogConfig,
    LogFormat,
    LogLevel,
    Mechanism,
    NodeConfig,
    Operation,
    ResourceKind,
    SecurityConfig,
)
from walstream.config.pipeline import PipelineConfig, TableMode, TableRule
from walstream.config.replica import ReplicaConfig
from walstream.config.replication import ClusterNode, LeaderRule, ReplicationConfig
from walstream.config.section import Section

__all__ = [
    "DEFAULT_FILE",
    "ENVIRONMENT_PREFIX",
    "NODE_SECTIONS",
    "RESERVED_HEADERS",
    "ROW_OPERATIONS",
    "AclRule",
    "CaptureConfig",
    "CaptureSecurityConfig",
    "ClientAuth",
    "ClusterNode",
    "Config",
    "FeedAuthConfig",
    "FeedConfig",
    "FeedTlsConfig",
    "LeaderRule",
    "LimitsConfig",
    "Loaded",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "Mechanism",
    "NodeConfig",
    "Operation",
    "Origin",
    "PipelineConfig",
    "PostgresConfig",
    "ReplicaConfig",
    "ReplicationConfig",
    "ResourceKind",
    "RowFormat",
    "RowOperation",
    "Section",
    "SecurityConfig",
    "SourceConfig",
    "StreamRule",
    "TableMode",
    "TableRule",
    "allowed",
    "environment_name",
    "fields",
    "is_reserved_header",
    "load",
    "load_default",
    "reference",
    "rules",
    "sections",
    "template",
    "value_of",
]
